"""What is no tensor, as JSON: what JSON has not becomes a dict of one key, and a tensor a number.

    (0.9, inf)              {"$tuple": [0.9, {"$float": "inf"}]}
    {1: "a"}                {"$dict": [[1, "a"]]}
    torch.zeros(2, 3)       {"$tensor": [7, [2, 3]]}: number 7 of those that are saved elsewhere, and its shape

Unlike a pickle, it holds nothing but these.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_SEQUENCES: dict[str, Callable[[list], Any]] = {"$tuple": tuple, "$set": set}
_MAPPINGS: dict[str, Callable[[dict], Any]] = {"$dict": dict, "$Counter": Counter}


def to_json(value: Any, tensors: list[Tensor], where: str) -> Any:
    """`value` for `json.dumps`; tensors in it are appended to `tensors`. TypeError, which says `where`, for what is no
    tensor, number, string or None, nor a list, tuple, set, dict or Counter of these."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_meta:
        tensors.append(value)
        return {"$tensor": [len(tensors) - 1, list(value.shape)]}
    if isinstance(value, list | tuple | set):
        items = [to_json(item, tensors, f"{where}[{number}]") for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"$set" if isinstance(value, set) else "$tuple": items}
    if isinstance(value, dict):
        names = [to_json(name, tensors, f"a key of {where}") for name in value]
        items = [to_json(item, tensors, f"{where}[{name!r}]") for name, item in value.items()]
        if all(isinstance(name, str) and not name.startswith("$") for name in names) and not isinstance(value, Counter):
            return dict(zip(names, items, strict=True))
        return {"$Counter" if isinstance(value, Counter) else "$dict": list(zip(names, items, strict=True))}
    what = f" of {value.layout} on {value.device}" if isinstance(value, Tensor) else ""
    raise TypeError(
        f"{where} is a {type(value).__name__}{what}: a checkpoint holds dense tensors, numbers, strings, None, and "
        "lists, tuples, sets and dicts of these"
    )


def from_json(found: Any, tensor: Callable[[Any, Any], Tensor]) -> Any:
    """Inverse of `to_json`; `tensor` gives one by its number and shape. For what `to_json` does not make, ValueError,
    TypeError or RecursionError; and what `tensor` raises."""
    if isinstance(found, list):
        return [from_json(item, tensor) for item in found]
    if not isinstance(found, dict):
        return found
    tag = next(iter(found), "")
    if not tag.startswith("$"):
        return {name: from_json(item, tensor) for name, item in found.items()}
    content = found[tag]
    if tag == "$tensor":
        number, shape = content
        return tensor(number, shape)
    if tag == "$float":
        return float(content)
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](from_json(content, tensor))
    if tag in _MAPPINGS:
        return _MAPPINGS[tag](dict(from_json(content, tensor)))
    raise ValueError(f"{tag[:80]!r} is unknown, allowed: $tensor, $float, {', '.join((*_SEQUENCES, *_MAPPINGS))}")
