"""Which modules are gathered together: the buckets of the engine."""

from collections import Counter
from collections.abc import Iterator

from torch import nn


def default_buckets(model: nn.Module) -> list[nn.Module]:
    """Members of the outermost `nn.ModuleList`s, without those that share a parameter with a module outside themselves:
    FSDP gathers a parameter with one bucket only, so these are left to the root's."""
    everywhere = uses(model)
    return [module for module in blocks(model) if uses(module).items() <= everywhere.items()]


def blocks(model: nn.Module) -> list[nn.Module]:
    """Members of the outermost `nn.ModuleList`s, a module that is listed twice once; of a list or dictionary in such a
    list its own members, as containers have no forward."""
    found: list[nn.Module] = []
    for child in model.children():
        found += _members(child) if isinstance(child, nn.ModuleList) else blocks(child)
    return list(dict.fromkeys(found))


def _members(container: nn.Module) -> Iterator[nn.Module]:
    for member in container.children():
        yield from _members(member) if isinstance(member, nn.ModuleList | nn.ModuleDict) else [member]


def uses(module: nn.Module) -> Counter[int]:
    """In how many places a parameter is, by id."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
