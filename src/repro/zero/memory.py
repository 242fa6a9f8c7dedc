"""Bytes of training state per rank that a plan needs: arithmetic, for plans too large to try."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from repro.zero.plan import Plan

ADAM_BYTES = 12  # fp32 master and two fp32 moments per parameter


def predict(
    plan: "Plan",
    parameters: int,
    weight_bytes: int = 2,
    gradient_bytes: int = 2,
    optimizer_bytes: int = ADAM_BYTES,
) -> dict[str, float]:
    """Bytes per rank by kind of state for `parameters` trainable values: each kind's bytes over the ranks it is spread over.

    With psi parameters, 16-bit weights and gradients and Adam: 16 psi / N for ZeRO-3, 2 psi / 8 more with a copy in a node of
    8, 1.25 psi + 12 psi / N for the hierarchical plan on Frontier.
    Without padding, activations, and what exists only during a collective or an update.
    """
    # A gradient that goes on to the optimizer's partition after each micro-batch is kept there.
    gradients = plan.gradients if plan.reduce_across == "step" else plan.optimizer
    return {
        "weights": weight_bytes * parameters / plan.degree(plan.weights),
        "secondary": weight_bytes * parameters / plan.degree(plan.secondary) if plan.keeps_copy else 0.0,
        "gradients": gradient_bytes * parameters / plan.degree(gradients),
        "optimizer": optimizer_bytes * parameters / plan.degree(plan.optimizer),
    }
