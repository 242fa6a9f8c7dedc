"""When an engine may be used, and what is refused since its next step would replace it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from repro.zero import fsdp_private, names


class BrokenEngineError(RuntimeError):
    """The engine is of no further use: what an exception left is not the same on all ranks, or half an update. Make a
    process group, a model and an optimizer anew (in new processes, best), and go on from a checkpoint."""


class Guard:
    """Of a sharded model whose weights are an engine's masters.

    usable    unless an exception ended what must not end
    sound     usable, no pass was left by an exception, what is trained is what was, and nobody else wrote weights
    """

    def __init__(self, model: nn.Module, weight_dtype: torch.dtype) -> None:
        self.model, self.weight_dtype = model, weight_dtype
        self._broken = ""  # why the engine is of no further use
        self._parameters = [
            (name, parameter, parameter._version, parameter.requires_grad)
            for name, parameter in names.parameters(model)
        ]
        for module in model.modules():
            module.register_load_state_dict_pre_hook(_refuse_to_load)

    @contextmanager
    def to_the_end(self, what: str) -> Iterator[None]:
        """An exception in this block ends the use of the engine."""
        try:
            yield
        except BrokenEngineError:
            raise  # of a block within this one, which has said why
        except BaseException as error:
            self._broken = f"{what} was ended by {type(error).__name__}: {error}"
            if isinstance(error, Exception):
                self.require_usable(error)
            raise

    def require_usable(self, cause: Exception | None = None) -> None:
        """BrokenEngineError unless it is."""
        if self._broken:
            raise BrokenEngineError(
                f"{self._broken}. The engine cannot go on: make a new process group, model and optimizer, and load a "
                "checkpoint"
            ) from cause

    def require_sound(self) -> None:
        """Before a forward and before a step; RuntimeError."""
        self.require_usable()
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "under torch.inference_mode() gathered weights become tensors that no later backward can use: evaluate "
                "under torch.no_grad()"
            )
        if fsdp_private.unfinished(self.model):
            raise RuntimeError(
                "an exception ended a forward or backward; before going on, call zero_grad() on all ranks"
            )
        self.require_same_trained()
        for name, parameter, version, _ in self._parameters:
            if parameter._version != version or parameter.dtype != self.weight_dtype:
                raise RuntimeError(
                    f"{name} was written to, but a model's weights are the masters of its ZeroOptimizer, which would "
                    "replace them at the next step: set weights before the model is wrapped, or by checkpoint.load"
                )

    def require_same_trained(self) -> None:
        """That the parameters which require a gradient are those of the masters; RuntimeError."""
        for name, parameter, _, trained in self._parameters:
            if parameter.requires_grad != trained:
                raise RuntimeError(
                    f"requires_grad of {name} was {trained} when the model was wrapped and is {not trained}: what is "
                    "trained is settled then. To change it, save a checkpoint before, and wrap a model with its "
                    "`consolidated` weights anew"
                )


def _refuse_to_load(*_: object) -> None:
    raise RuntimeError(
        "load_state_dict of a model that a ZeroOptimizer has wrapped: its masters would replace these weights at the "
        "next step; load them before the model is wrapped, or use checkpoint.load"
    )
