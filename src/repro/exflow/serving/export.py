"""Placements as files: the published solver's CSV, and what expert-parallel servers read.

Servers number places: with E/P experts per GPU, place s is on GPU s // (E/P), and their map says which expert lies in
each place of each MoE layer (`physical_to_logical`). Server versions without such an option serve a reordered
checkpoint (`permute.py`).
"""

import csv
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from repro.exflow.evaluate import check_gpu
from repro.exflow.placement import Placement
from repro.exflow.serving.slots import Replicas, physical_to_logical
from repro.files import replacing

Placed = np.ndarray | Placement | Replicas  # an array: the GPU of every expert, int [layers, E]


def write_csv(placed: Placed, path: str | Path) -> None:
    """Write a placement as the published solver does: `Expert,Node`, a row per expert. Expert e of layer l is number
    l·E + e; `Node` is its GPU, counted over all nodes. The file appears whole or not at all, as those below.
    ValueError for a placement with copies; of all formats, for unequal numbers of experts on the GPUs."""
    _write(path, "Expert,Node\n" + "".join(f"{expert},{node}\n" for expert, node in enumerate(_gpu(placed).ravel())))


def read_csv(path: str | Path, layers: int, experts: int, gpus: int) -> np.ndarray:
    """The GPU of every expert, int64 [layers, experts], from a file as `write_csv` and the published solver write it
    (rows in any order, either kind of line end). ValueError names the file, the row, what was found and what is
    allowed; FileNotFoundError when there is none."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such placement")
    if not path.is_file():
        raise ValueError(f"{path}: a folder, pipe or device, allowed: an ordinary file")
    if (size := path.stat().st_size) > 64 * (layers * experts + 1):
        raise ValueError(f"{path}: {size:,} bytes, too long for {layers} layers of {experts} experts")
    try:
        rows = list(csv.reader(path.read_text("utf-8-sig").splitlines()))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not a CSV file: {error}") from error
    if not rows or rows[0] != ["Expert", "Node"]:
        raise ValueError(f"{path}: row 1 is {','.join(rows[0])[:80] if rows else 'missing'!r}, allowed: 'Expert,Node'")
    try:
        gpu = _assigned(rows[1:], layers * experts, gpus).reshape(layers, experts)
        check_even(gpu, gpus)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return gpu


def _assigned(rows: Iterable[list[str]], experts: int, gpus: int) -> np.ndarray:
    """int64 [experts]: the GPU that the rows give each; ValueError unless each has one. Rows count from the header."""
    found = np.full(experts, -1)
    for number, row in enumerate(rows, 2):
        if len(row) != 2 or not all(cell.isascii() and cell.isdigit() and len(cell) < 10 for cell in row):
            raise ValueError(
                f"row {number} is {','.join(row)[:80]!r}, allowed: two whole numbers, an expert and its GPU"
            )
        expert, node = map(int, row)
        if expert >= experts or node >= gpus:
            raise ValueError(
                f"row {number} has expert {expert} on GPU {node}, allowed: experts 0 to {experts - 1}, GPUs 0 to {gpus - 1}"
            )
        if found[expert] >= 0:
            raise ValueError(f"row {number} has expert {expert} again, allowed: once")
        found[expert] = node
    if len(missing := np.flatnonzero(found < 0)):
        raise ValueError(
            f"{len(missing)} of {experts} experts have no row, expert {missing[0]} the first; allowed: none"
        )
    return found


def check_even(gpu: np.ndarray, gpus: int) -> None:
    """ValueError unless `gpu`, integer [layers, E], has E/P experts of each layer on every GPU."""
    check_gpu(gpu, gpus)
    share = gpu.shape[1] // gpus
    for layer, row in enumerate(gpu):
        held = np.bincount(row, minlength=gpus)
        if (held != share).any():
            worst = int(np.abs(held - share).argmax())
            raise ValueError(f"layer {layer} has {held[worst]} experts on GPU {worst}, allowed: {share} on each")


def _gpu(placed: Placed) -> np.ndarray:
    """int [layers, E]: the GPU of every expert. ValueError for copies, and where GPUs have unequal numbers of experts:
    the files do not say how many each GPU has, and servers cut a layer's experts evenly."""
    if not isinstance(placed, Replicas):
        gpu, gpus = (placed.gpu, placed.gpus) if isinstance(placed, Placement) else (placed, int(placed.max()) + 1)
        check_even(gpu, gpus)
        return gpu
    if placed.physical_to_logical.shape[1] > placed.num_experts:
        raise ValueError("the placement has copies, which this format does not hold; allowed: sglang, vllm")
    return placed.hosted.argmax(axis=2)


def _slots(placed: Placed) -> np.ndarray:
    """int64 [layers, slots]: the expert in each place."""
    if not isinstance(placed, Replicas):
        return physical_to_logical(_gpu(placed))
    if placed.share is not None:
        raise ValueError(
            "the copies have shares of their own, which no file holds; allowed: dispatch nearest, round_robin"
        )
    return placed.physical_to_logical


def write_sglang(placed: Placed, path: str | Path, dense_layers: int = 0) -> None:
    """For SGLang's `--init-expert-location FILE.json`, with replicas also its `--ep-num-redundant-experts`. It counts
    all layers of a model: `dense_layers` are those before the first MoE layer (3 for DeepSeek-V3), which get the
    identity. ValueError for a path that does not end in .json, and for copies with shares."""
    if Path(path).suffix != ".json":
        raise ValueError(f"{path}: SGLang reads a file as JSON when its name ends in .json")
    order = _slots(placed)
    identity = np.tile(np.arange(order.shape[1]) % (order.max() + 1), (dense_layers, 1))
    _write(path, json.dumps({"physical_to_logical_map": np.concatenate((identity, order)).tolist()}))


def write_vllm(placed: Placed, path: str | Path) -> None:
    """For vLLM's initial expert map (pull request 49572, open in November 2026): a JSON list of the experts by place
    for every MoE layer, replicas included. Released versions serve a reordered checkpoint (`permute.py`). ValueError for
    copies with shares."""
    _write(path, json.dumps(_slots(placed).tolist()))


def write_vllm_ascend(placed: Placed, path: str | Path) -> None:
    """For vllm-ascend's `expert_map_path`: the experts of every device of every MoE layer. ValueError for a placement
    with copies."""
    gpu = _gpu(placed)
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
