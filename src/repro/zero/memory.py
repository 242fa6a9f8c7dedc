"""Bytes per rank that a plan needs: arithmetic, for plans and models too large to try."""

from repro.comm import most_under_way
from repro.zero.layout import BucketLayout, Layout, shard_numel, up_to_multiple
from repro.zero.plan import Plan

WEIGHT_BYTES = 2
ADAM_BYTES = 12  # fp32 master and two fp32 moments per parameter
SUM_BYTES = 4  # gradients are summed in fp32


def formula(plan: Plan, parameters: int) -> dict[str, float]:
    """Bytes per rank by kind of state for `parameters` trainable values: its bytes over the ranks it is spread over.

    With psi parameters, 16-bit weights and gradients and Adam: 16 psi / N for ZeRO-3, 2 psi / 8 more with secondary
    shards in a node of 8, 1.25 psi + 12 psi / N for the hierarchical plan on Frontier. Without padding, activations and
    working memory.
    """
    return {
        "weights": WEIGHT_BYTES * parameters / plan.degree(plan.weights),
        "secondary": WEIGHT_BYTES * parameters / plan.degree(plan.secondary) if plan.has_secondary else 0.0,
        "gradients": 2 * parameters / plan.degree(_kept(plan)),
        "optimizer": ADAM_BYTES * parameters / plan.degree(plan.optimizer),
    }


def predict(plan: Plan, model: Layout, gradient_bytes: int = 2) -> dict[str, int]:
    """The same for the buckets of a real model, padding and frozen parameters included: what the engine holds, to the
    byte (apart from the optimizer's counters), with 16-bit weights and Adam. `gradient_bytes`: of a value of the sums
    between backward and step; 4 for the default `gradient_dtype` of `ZeroOptimizer`, fp32."""
    weights, secondary, gradients, optimizer = 0, 0, 0, 0
    for bucket in model.buckets:
        shard = shard_numel(bucket.trainable, plan.degree(plan.weights))
        weights += WEIGHT_BYTES * (shard + shard_numel(bucket.frozen, plan.degree(plan.weights)))
        secondary += WEIGHT_BYTES * _gathered(plan, bucket) // plan.degree(plan.secondary) if plan.has_secondary else 0
        per_weight_shard = plan.degree(plan.optimizer) // plan.degree(plan.weights)
        padded = up_to_multiple(shard, per_weight_shard)
        gradients += gradient_bytes * padded // (plan.degree(_kept(plan)) // plan.degree(plan.weights))
        optimizer += ADAM_BYTES * padded // per_weight_shard
    return {"weights": weights, "secondary": secondary, "gradients": gradients, "optimizer": optimizer}


def working(plan: Plan, model: Layout) -> int:
    """Estimate of what exists during a backward beside the states: the root bucket's gathered weights and those of two
    others (the current one and the prefetched one), the current one's gradients in 16 bits and, for their sum, in
    fp32."""
    *blocks, root = [_gathered(plan, bucket) for bucket in model.buckets]
    largest = max(blocks, default=root)
    return WEIGHT_BYTES * (root + 2 * largest) + (2 + SUM_BYTES) * max(largest, root)


def needed(plan: Plan, model: Layout, activations: int = 0, gradient_bytes: int = 2) -> int:
    """Bytes that a rank needs: the states of `predict`, and the larger of what a backward and a step take beside them.
    A backward takes its working memory and `activations`, a step the fp32 sums in the optimizer partition (none where
    gradients are reduced across after every micro-batch: there the accumulated sums are these)."""
    sums = under_way(plan, model)["sums"] if plan.reduce_across == "step" else 0
    states = sum(predict(plan, model, gradient_bytes).values())
    return states + max(working(plan, model) + activations, sums)


def under_way(plan: Plan, model: Layout, itemsize: int = 2) -> dict[str, int]:
    """The most that an engine's streams hold of their own at a time, where threads take collectives on (gloo; other
    backends have one at a time): as many buckets as their routes have hops of several ranks, and one.

    gradients   whole, of the width of the weights, `itemsize` bytes: from a bucket's backward to its reduction
    sums        fp32, in the optimizer partition before `step`; of all buckets once all have arrived
    weights     new ones of a weight shard, from a publication to their place
    """
    moves, weights = plan.moves, plan.degree(plan.weights)
    trained = [shard_numel(bucket.trainable, weights) for bucket in model.buckets]
    parts = plan.degree(plan.optimizer) // weights
    padded = [up_to_multiple(shard, parts) for shard in trained]
    across = (moves.reduce_to_optimizer, moves.all_reduce_replicas) if plan.reduce_across == "micro_batch" else ()
    reductions = most_under_way(plan.topology, moves.reduce_to_weights, moves.reduce_to_gradients, *across)
    publications = most_under_way(plan.topology, moves.gather_updated)
    return {
        "gradients": itemsize * weights * sum(sorted(trained)[-reductions:]),
        "sums": SUM_BYTES * sum(padded) // parts,
        "weights": itemsize * sum(sorted(padded)[-publications:]),
    }


def activations(layers: int, hidden: int, seq_len: int, micro_batch: int, vocab: int, *, checkpointing: bool) -> int:
    """Estimate of a GPT's 16-bit activations: 34 s b h bytes per layer with fused attention (Korthikanti et al. 2022,
    Eq. 1 without the attention scores); with checkpointing 2 s b h per layer and one layer in full; and the logits in
    fp32, their gradient, and both in 16 bits."""
    tokens = seq_len * micro_batch
    of_layers = 2 * layers + 34 if checkpointing else 34 * layers
    return tokens * hidden * of_layers + 12 * tokens * vocab


def _kept(plan: Plan) -> str | None:
    """Level that accumulated gradients are kept on; those reduced after each micro-batch stay where they arrive."""
    return plan.gradients if plan.reduce_across == "step" else plan.optimizer


def _gathered(plan: Plan, bucket: BucketLayout) -> int:
    """Values of a gathered bucket, padding included."""
    ranks = plan.degree(plan.weights)
    return ranks * shard_numel((*bucket.trainable, *bucket.frozen), ranks)
