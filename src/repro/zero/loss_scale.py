"""Loss scaling for float16: gradients below 3e-8 would become zero, so they are scaled up until the update.

The scale is applied where gradients enter the model, not to the loss: `loss.backward()` of a training loop stays as it
is.
"""

import copy
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

# A scale below the one says that the loss or the model is no longer finite; fp32 has no power of two above the other.
SMALLEST, LARGEST = 2.0**-24, 2.0**127


class LossScale:
    """Factor on all gradients. As `torch.amp.GradScaler` does by default, it is halved at a step whose gradients
    overflow (that step is left out) and doubled after `growth_interval` steps without one.

    `skipped` counts the steps that were left out. Each optimizer needs one of its own. ValueError for a scale outside
    2^-24 to 2^127, and an interval that is no positive integer.
    """

    def __init__(self, initial: float = 2.0**16, growth_interval: int = 2000) -> None:
        if not isinstance(growth_interval, int) or growth_interval < 1:
            raise ValueError(f"growth_interval is {growth_interval!r}, allowed: an integer of at least 1")
        self.value, self.growth_interval = _scale("initial", initial), growth_interval
        self.good_steps = self.skipped = 0
        self.forget()

    def attach(self, model: nn.Module) -> None:
        """Scale the gradients that enter `model`: those of tensors in tuples, lists, dictionaries and dataclasses.
        float16 outputs become float32, so these are not rounded. Gradients that leave the model through its inputs, in
        tuples, lists and dictionaries, are divided again: what made an input may be this model, or have another
        optimizer. A forward whose output hides all its tensors in something else raises TypeError: its gradients would
        not be scaled. Nor are those of a loss that is made of other tensors than the returned ones, such as an
        attribute of the model: return it as well."""
        # Before FSDP's hook, which rounds inputs: gradients are divided as wide as they leave.
        model.register_forward_pre_hook(self._unscale_inputs, prepend=True, with_kwargs=True)
        model.register_forward_hook(self._scale_outputs)

    def require_scaled(self) -> None:
        """RuntimeError unless gradients have entered through what a call of the model returned, since `forget`."""
        if not self._entered:
            raise RuntimeError(
                "no gradient entered through what a call of the model returned, so none was scaled: with float16 call "
                "the model itself, no other method, and make the loss of what it returns"
            )

    def forget(self) -> None:
        """The gradients are gone."""
        self._entered = False

    def _unscale_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return tree_map(self._unscaled, args), tree_map(self._unscaled, kwargs)

    def _unscaled(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad or not torch.is_grad_enabled():
            return value
        value = value.view_as(value)  # other uses of the input are not the model's
        value.register_hook(partial(torch.div, other=self.value))
        return value

    def _scale_outputs(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        self._reached, self._unknown = False, ""
        scaled = tree_map(self._scaled, outputs)
        if self._unknown and not self._reached and module.training and torch.is_grad_enabled():
            raise TypeError(
                f"the model's output has a {self._unknown} and no tensor with a gradient that loss scaling could find; "
                "allowed: tensors, in tuples, lists, dictionaries and dataclasses"
            )
        return scaled

    def _scaled(self, output: Any) -> Any:
        if is_dataclass(output) and not isinstance(output, type):
            output = copy.copy(output)
            for field in fields(output):  # also of a frozen one
                object.__setattr__(output, field.name, tree_map(self._scaled, getattr(output, field.name)))
            return output
        if not isinstance(output, Tensor):
            if output is not None and not isinstance(output, bool | int | float | str):
                self._unknown = type(output).__name__
            return output
        if not output.is_floating_point():
            return output
        # A tensor of its own: the model may use the output inside too, and that gradient is scaled already.
        output = output.float() if output.dtype == torch.float16 else output.view_as(output)
        if output.requires_grad:
            self._reached = True
            output.register_hook(partial(self._enter, self.value))
        return output

    def _enter(self, factor: float, gradient: Tensor) -> Tensor:
        self._entered = True
        return gradient * factor

    def update(self, finite: bool) -> None:
        """After a step: were the gradients finite? FloatingPointError when they were not at any scale down to 2^-24."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.skipped += 1
            if self.value / 2 < SMALLEST:
                raise FloatingPointError(
                    f"gradients overflow even with a loss scale of {self.value:g} ({self.skipped} steps left out so "
                    "far): the loss or the weights are not finite any more"
                )
            self.value /= 2
        elif self.good_steps >= self.growth_interval:  # more: of a checkpoint with a longer one
            self.value, self.good_steps = min(self.value * 2, LARGEST), 0

    def state_dict(self) -> dict[str, float]:
        """Value and counters, for a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Inverse of `state_dict`; ValueError as of the constructor."""
        self.value = _scale("value", state["value"])
        self.good_steps, self.skipped = int(state["good_steps"]), int(state["skipped"])


def _scale(name: str, value: float) -> float:
    if isinstance(value, int | float) and SMALLEST <= value <= LARGEST:  # NaN is not
        return value
    raise ValueError(f"loss scale: {name} is {value!r}, allowed: a number from 2^-24 to 2^127")
