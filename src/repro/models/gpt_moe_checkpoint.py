"""A trained GPT-MoE in one safetensors file: weights in 16 bits, and the sizes of the model as JSON in the metadata."""

import dataclasses
import json
from pathlib import Path

import torch

from repro.models.gpt_moe import GPTMoE, GPTMoEConfig
from repro.models.reading import finite, naming, ordinary_file

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
except ImportError as error:
    raise ImportError(f"{__name__} needs safetensors: pip install 'repro-papers[exflow]'", name=error.name) from error

_SIZES = "gpt_moe_config"  # key of the metadata


def save(model: GPTMoE, path: str | Path, dtype: torch.dtype = torch.float16) -> None:
    """Write the weights in `dtype` and the model's sizes. ValueError when a weight is not finite in `dtype`."""
    weights = {name: weight.to(dtype).contiguous() for name, weight in model.state_dict().items()}
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise ValueError(f"{path}: {name} is not finite in {dtype}")
    save_file(weights, path, {_SIZES: json.dumps(dataclasses.asdict(model.config))})


def load(path: str | Path) -> GPTMoE:
    """The model in fp32, in evaluation mode. FileNotFoundError when there is no file; ValueError names the file and
    what is wrong with it: not safetensors, no sizes or those of no model, weights that do not fit them (said before
    memory is taken), or that are NaN or infinite."""
    path = ordinary_file(Path(path))
    with naming(path):
        try:
            with safe_open(path, framework="pt") as file:
                config = _config(file.metadata() or {})
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except SafetensorError as error:
            raise ValueError(f"not a safetensors file: {error}") from error
        for name, weight in weights.items():
            if not weight.is_floating_point():
                raise ValueError(f"{name} has dtype {weight.dtype}, allowed: floating point")
        try:
            with torch.device("meta"):  # shapes alone
                GPTMoE(config).load_state_dict(weights, assign=True)
        except RuntimeError as error:
            raise ValueError(error) from error
        model = GPTMoE(config)
        model.load_state_dict({name: finite(name, weight.float()) for name, weight in weights.items()})
    return model.eval()


def _config(metadata: dict[str, str]) -> GPTMoEConfig:
    """ValueError where they hold none."""
    if _SIZES not in metadata:
        found = ", ".join(sorted(metadata)) or "none"
        raise ValueError(f"not a GPT-MoE: no metadata {_SIZES!r}, found: {found}")
    try:
        return GPTMoEConfig(**json.loads(metadata[_SIZES]))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"metadata {_SIZES!r}: {error}") from error
