"""Which values of a bucket are a rank's, in each of the three partitions."""

from repro.zero.plan import Plan


def splits(plan: Plan) -> tuple[int, int]:
    """Number of gradient parts in a weight shard, and of optimizer parts in a gradient part. Their product is the
    number of chunks of a weight shard."""
    weights, gradients, optimizer = (plan.degree(level) for level in (plan.weights, plan.gradients, plan.optimizer))
    return gradients // weights, optimizer // gradients


def own_chunk(plan: Plan, rank: int) -> int:
    """Number of the chunk of its weight shard that `rank` updates, counted from the shard's first.

    Worked example: the hierarchical plan on 2 nodes of 2 packages of 2 GCDs. `splits` is (2, 2), so a weight shard has
    4 chunks, and a bucket, which is the shards of a package's 2 GCDs, has chunks 0 to 7. Chunks that a rank has:

        rank   node, package, GCD   weights   after package   after node   after cluster   arrive as
        0      0, 0, 0              0 1 2 3   0 1 2 3         0 1          0               0 2 1 3
        1      0, 0, 1              4 5 6 7   4 5 6 7         4 5          4               4 6 5 7
        2      0, 1, 0              0 1 2 3   0 1 2 3         2 3          2               0 2 1 3
        3      0, 1, 1              4 5 6 7   4 5 6 7         6 7          6               4 6 5 7
        4      1, 0, 0              0 1 2 3   0 1 2 3         0 1          1               0 2 1 3
        5      1, 0, 1              4 5 6 7   4 5 6 7         4 5          5               4 6 5 7
        6      1, 1, 0              0 1 2 3   0 1 2 3         2 3          3               0 2 1 3
        7      1, 1, 1              4 5 6 7   4 5 6 7         6 7          7               4 6 5 7

    weights          before a forward or backward, the shard that it gives to its package
    after package    of a gradient, after the reduce-scatter in the package, `moves.reduce_to_weights`
    after node       and after that between the packages of the node, `moves.reduce_to_gradients`; accumulated here
    after cluster    in `step`, after the reduce-scatter between nodes, `moves.reduce_to_optimizer`; updated here
    arrive as        the new weights, gathered from nodes and packages in rank order; `_publishing` sorts the chunks
    """
    gradient_parts, optimizer_parts = splits(plan)
    gradient_part = rank // plan.degree(plan.weights) % gradient_parts
    return gradient_part * optimizer_parts + rank // plan.degree(plan.gradients) % optimizer_parts
