"""Placements as files: the published solver's CSV, and what expert-parallel servers read.

Servers number places: with E/P experts per GPU, place s is on GPU s // (E/P), and their map says which expert lies in
each place of each MoE layer (`physical_to_logical`). Server versions without such an option serve a reordered
checkpoint (`permute.py`).
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from repro.exflow.serving.slots import Replicas, physical_to_logical
from repro.files import replacing


def write_csv(gpu: np.ndarray, path: str | Path) -> None:
    """Write `gpu` (int [layers, E]) as the published solver does: `Expert,Node`, one row per expert of every layer.

    Experts are numbered through the layers, expert e of layer l is l·E + e; `Node` is its GPU, counted over all nodes.
    The file appears whole or not at all, as those below.
    """
    _write(path, "Expert,Node\n" + "".join(f"{expert},{node}\n" for expert, node in enumerate(gpu.ravel())))


def _slots(placed: np.ndarray | Replicas) -> np.ndarray:
    """int64 [layers, slots]: the expert in each place, of a placement as `gpu` or of one with replicas."""
    return physical_to_logical(placed) if isinstance(placed, np.ndarray) else placed.physical_to_logical


def write_sglang(placed: np.ndarray | Replicas, path: str | Path, dense_layers: int = 0) -> None:
    """For SGLang's `--init-expert-location FILE.json`, with replicas also its `--ep-num-redundant-experts`. It counts
    all layers of a model: `dense_layers` are those before the first MoE layer (3 for DeepSeek-V3), which get the
    identity. ValueError for a path that does not end in .json."""
    if Path(path).suffix != ".json":
        raise ValueError(f"{path}: SGLang reads a file as JSON when its name ends in .json")
    order = _slots(placed)
    identity = np.tile(np.arange(order.shape[1]) % (order.max() + 1), (dense_layers, 1))
    _write(path, json.dumps({"physical_to_logical_map": np.concatenate((identity, order)).tolist()}))


def write_vllm(placed: np.ndarray | Replicas, path: str | Path) -> None:
    """For vLLM's initial expert map: a JSON list of the experts by place for every MoE layer, replicas included.

    As proposed in vLLM's pull request 49572, open in November 2026: released versions serve a reordered checkpoint
    (`permute.py`).
    """
    _write(path, json.dumps(_slots(placed).tolist()))


def write_vllm_ascend(gpu: np.ndarray, path: str | Path) -> None:
    """For vllm-ascend's `expert_map_path`: the experts of every device of every MoE layer."""
    devices = int(gpu.max()) + 1
    layers = [
        {
            "layer_id": layer,
            "device_count": devices,
            "device_list": [
                {"device_id": device, "device_expert": experts}
                for device, experts in enumerate(order.reshape(devices, -1).tolist())
            ],
        }
        for layer, order in enumerate(physical_to_logical(gpu))
    ]
    _write(path, json.dumps({"moe_layer_count": len(layers), "layer_list": layers}))


FORMATS: dict[str, Callable[..., None]] = {
    "csv": write_csv,
    "sglang": write_sglang,
    "vllm": write_vllm,
    "vllm-ascend": write_vllm_ascend,
}


def _write(path: str | Path, content: str) -> None:
    with replacing(Path(path)) as temporary:
        temporary.write_text(content, newline="")
