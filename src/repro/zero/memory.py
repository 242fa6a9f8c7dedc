"""Bytes per rank that a plan needs: arithmetic, for plans and models too large to try."""

from repro.zero.layout import BucketLayout, Layout, shard_numel, up_to_multiple
from repro.zero.plan import Plan

ADAM_BYTES = 12  # fp32 master and two fp32 moments per parameter
REDUCE_BYTES = 4  # gradients are summed in fp32


def formula(
    plan: Plan,
    parameters: int,
    weight_bytes: int = 2,
    gradient_bytes: int = 2,
    optimizer_bytes: int = ADAM_BYTES,
) -> dict[str, float]:
    """Bytes per rank by kind of state for `parameters` trainable values: its bytes over the ranks it is spread over.

    With psi parameters, 16-bit weights and gradients and Adam: 16 psi / N for ZeRO-3, 2 psi / 8 more with secondary
    shards in a node of 8, 1.25 psi + 12 psi / N for the hierarchical plan on Frontier. Without padding, activations and
    working memory.
    """
    return {
        "weights": weight_bytes * parameters / plan.degree(plan.weights),
        "secondary": weight_bytes * parameters / plan.degree(plan.secondary) if plan.has_secondary else 0.0,
        "gradients": gradient_bytes * parameters / plan.degree(_kept(plan)),
        "optimizer": optimizer_bytes * parameters / plan.degree(plan.optimizer),
    }


def predict(
    plan: Plan,
    model: Layout,
    weight_bytes: int = 2,
    gradient_bytes: int = 2,
    optimizer_bytes: int = ADAM_BYTES,
) -> dict[str, int]:
    """The same for the buckets of a real model, padding and frozen parameters included: what the engine holds, to the
    byte (apart from the optimizer's counters).

    `optimizer_bytes`: 4 for the master and 4 for each tensor of state, so 4 for SGD, 8 with momentum, 12 for Adam.
    """
    weights, secondary, gradients, optimizer = 0, 0, 0, 0
    for bucket in model.buckets:
        shard = shard_numel(bucket.trainable, plan.degree(plan.weights))
        weights += weight_bytes * (shard + shard_numel(bucket.frozen, plan.degree(plan.weights)))
        secondary += weight_bytes * _gathered(plan, bucket) // plan.degree(plan.secondary) if plan.has_secondary else 0
        per_weight_shard = plan.degree(plan.optimizer) // plan.degree(plan.weights)
        padded = up_to_multiple(shard, per_weight_shard)
        gradients += gradient_bytes * padded // (plan.degree(_kept(plan)) // plan.degree(plan.weights))
        optimizer += optimizer_bytes * padded // per_weight_shard
    return {"weights": weights, "secondary": secondary, "gradients": gradients, "optimizer": optimizer}


def working(plan: Plan, model: Layout, weight_bytes: int = 2) -> int:
    """Estimate of what exists during a backward beside the states: the root bucket's gathered weights and those of two
    others (the current one and the prefetched one), the current one's gradients in 16 bits and, for their sum, in
    fp32."""
    *blocks, root = [_gathered(plan, bucket) for bucket in model.buckets]
    largest = max(blocks, default=root)
    return weight_bytes * (root + 2 * largest) + (weight_bytes + REDUCE_BYTES) * max(largest, root)


def activations(
    layers: int, hidden: int, seq_len: int, micro_batch: int, vocab: int, *, checkpointing: bool, layer_factor: int = 34
) -> int:
    """Estimate of a GPT's 16-bit activations: 34 s b h bytes per layer with fused attention (Korthikanti et al. 2022,
    Eq. 1 without the attention scores); with checkpointing 2 s b h per layer and one layer in full; and the logits in
    fp32, their gradient, and both in 16 bits."""
    tokens = seq_len * micro_batch
    per_layer = 2 if checkpointing else layer_factor
    recomputed = layer_factor if checkpointing else 0
    return tokens * hidden * (layers * per_layer + recomputed) + 12 * tokens * vocab


def _kept(plan: Plan) -> str | None:
    """Level that accumulated gradients are kept on; those reduced after each micro-batch stay where they arrive."""
    return plan.gradients if plan.reduce_across == "step" else plan.optimizer


def _gathered(plan: Plan, bucket: BucketLayout) -> int:
    """Values of a gathered bucket, padding included."""
    ranks = plan.degree(plan.weights)
    return ranks * shard_numel((*bucket.trainable, *bucket.frozen), ranks)
