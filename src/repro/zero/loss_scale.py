"""Loss scaling for float16: gradients below 6e-8 would become zero, so they are scaled up until the update.

The scale is applied where gradients enter the model, not to the loss: `loss.backward()` of a training loop stays as it
is.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class LossScale:
    """Factor on all gradients. As `torch.amp.GradScaler` does by default, it is halved at a step whose gradients
    overflow (that step is left out) and doubled after `growth_interval` steps without one.

    `skipped` counts the steps that were left out.
    """

    def __init__(self, initial: float = 2.0**16, growth_interval: int = 2000) -> None:
        if initial <= 0 or growth_interval < 1:
            raise ValueError(f"loss scale {initial}, growth interval {growth_interval}: both must be positive")
        self.value, self.growth_interval = initial, growth_interval
        self.good_steps = self.skipped = 0

    def attach(self, model: nn.Module) -> None:
        """Scale the gradients that enter `model`; float16 outputs become float32, so these are not rounded."""
        model.register_forward_hook(lambda module, args, outputs: tree_map(self._scaled, outputs))

    def _scaled(self, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        # A tensor of its own: the model may use the output inside too, and that gradient is scaled already.
        output = output.float() if output.dtype == torch.float16 else output.view_as(output)
        if output.requires_grad:
            output.register_hook(lambda gradient, factor=self.value: gradient * factor)
        return output

    def update(self, finite: bool) -> None:
        """After a step: were the gradients finite?"""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value, self.skipped = self.value / 2, self.skipped + 1
        elif self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0

    def state_dict(self) -> dict[str, float]:
        """Value and counters, for a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Inverse of `state_dict`."""
        self.value, self.good_steps, self.skipped = state["value"], int(state["good_steps"]), int(state["skipped"])
