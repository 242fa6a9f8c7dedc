"""Names of parameters and buffers as the plain model has them: torch's wrappers around a module add parts of their own."""

from collections.abc import Iterator

from torch import Tensor, nn

# Of `checkpoint_wrapper`, which leaves its part out of a state dict, and of `torch.compile(module)`, which does not.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def plain(name: str) -> str:
    """`blocks.0._checkpoint_wrapped_module.up.weight` → `blocks.0.up.weight`."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def parameters(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """As `named_parameters`, with plain names."""
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield plain(name), parameter


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """By plain name, the buffers that a state dict of the model has; one that is in several places, in each."""
    saved = {plain(name) for name in model.state_dict()}
    named = ((plain(name), buffer) for name, buffer in model.named_buffers(remove_duplicate=False))
    return {name: buffer for name, buffer in named if name in saved}
