"""Megatron-FSDP's HFSDP, run on CPUs: what it trains, holds and sends, beside our plan of that name. Where the library does
otherwise than its documentation says, a test shows it."""

from collections import Counter

import megatron_on_cpu
import pytest
import torch
import torch.distributed as dist
from ddp_reference import Setting, batch

from repro.baselines import megatron, trainer
from repro.launch import RankError, launch
from repro.models.gpt import GPT, GPTConfig
from repro.scaling.step import layout_of
from repro.topology import frontier
from repro.zero import ZeroOptimizer, memory, plan, traffic

pytest.importorskip("megatron_fsdp", reason="no megatron-fsdp")
FOUR = frontier(2, 1, 2)  # 2 nodes of 2 ranks
SHAPE = GPTConfig(layers=3, hidden=64, heads=4, seq_len=16, vocab=64)
HFSDP = plan.hfsdp(FOUR)
BLOCKS, WHOLE = 3 * (12 * 64 * 64 + 13 * 64), SHAPE.parameters  # values


def _sharded(dtype, meta=False, max_grad_norm=0.5):
    megatron_on_cpu.prepare()
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = GPT(SHAPE)
    return megatron.hfsdp(model, FOUR, trainer.Training({"lr": 1e-2}, max_grad_norm, dtype, model.init_weights))


def _losses(trained, rank, steps=4):
    return [trained.step([batch(step, rank, number) for number in range(1 + step % 2)]) for step in range(steps)]


def _theirs(rank, world, dtype, meta):
    return _losses(_sharded(dtype, meta), rank)


def _ours(rank, world):
    model = Setting(shape=SHAPE).model()
    options = {"weight_dtype": torch.float32, "gradient_dtype": torch.float32, "max_grad_norm": 0.5, "lr": 1e-2}
    return _losses(trainer.Trainer(model, ZeroOptimizer(model, plan.unquantised(HFSDP), **options), "cpu"), rank)


def test_it_trains_as_our_plan_does():
    """With one micro-batch and with two, clipped at every step."""
    theirs, ours = launch(_theirs, 4, torch.float32, False, timeout_s=100), launch(_ours, 4, timeout_s=100)
    for those, these in zip(theirs, ours, strict=True):
        assert those == pytest.approx(these, rel=1e-5)


def test_a_model_on_the_meta_device_starts_from_weights_of_the_same_spread():
    real, meta = (launch(_theirs, 4, torch.bfloat16, on, timeout_s=100) for on in (False, True))
    for those, these in zip(meta, real, strict=True):
        assert those[0] == pytest.approx(these[0], rel=0.03) and those[-1] < 0.95 * those[0]


def _counted(rank, world, micro_batches):
    """Bytes that the rank sends in a step, by collective and by the ranks that take part; and the bytes that it holds."""
    trained, sent = _sharded(torch.bfloat16), Counter()

    def counting(name):
        call, part = (
            getattr(dist, name),
            {"all_gather_into_tensor": "input_tensor", "reduce_scatter_tensor": "output"}[name],
        )

        def counted(*args, group, **tensors):
            others = dist.get_process_group_ranks(group)
            sent[name, tuple(others)] += tensors[part].nbytes * (len(others) - 1)
            return call(*args, group=group, **tensors)

        setattr(dist, name, counted)

    counting("all_gather_into_tensor")
    counting("reduce_scatter_tensor")
    for step in range(2):
        sent.clear()
        trained.step([batch(step, rank, number) for number in range(micro_batches)])
    return dict(sent), trained.held_bytes()


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_bytes_are_those_of_our_plan_but_for_weights_between_nodes(micro_batches):
    """Blocks are gathered between the nodes before the forward *and* before the backward of a step's first micro-batch,
    though new weights come once; the root stays gathered from its forward to its backward."""
    (found, held), *_ = launch(_counted, 4, micro_batches, timeout_s=100)
    inside, between = (0, 1), (0, 2)
    shard = 2 / 2 / 2  # bytes of a value, of which a rank of two sends a half; between nodes, of the half of its rank
    assert found["reduce_scatter_tensor", inside] == pytest.approx(2 * shard * micro_batches * WHOLE, rel=0.01)
    assert found["reduce_scatter_tensor", between] == pytest.approx(shard * WHOLE, rel=0.01)
    root = WHOLE - BLOCKS
    assert found["all_gather_into_tensor", inside] == pytest.approx(
        2 * shard * (2 * micro_batches * BLOCKS + micro_batches * root), rel=0.02
    )
    assert found["all_gather_into_tensor", between] == pytest.approx(shard * (2 * BLOCKS + root), rel=0.02)
    sent = traffic.step_bytes(HFSDP, layout_of(SHAPE), micro_batches, native=True)
    of_plan = sent["cluster"] / 4
    assert of_plan == pytest.approx(2 * shard * WHOLE, rel=0.01)  # once to the nodes, once back
    theirs = sum(nbytes for (_, ranks), nbytes in found.items() if ranks == between)
    assert 1.4 < theirs / of_plan < 1.5
    # Memory is our arithmetic's: 16-bit weights, Adam's states of all ranks. Its sums of gradients are in 32 bits.
    states = memory.predict(HFSDP, layout_of(SHAPE))
    assert held["weights"] == pytest.approx(states["weights"], rel=0.01)
    assert held["optimizer"] == pytest.approx(states["optimizer"], rel=0.01)
    assert held["gradients"] == pytest.approx(4 * WHOLE / 2, rel=0.01)


def _norms(rank, world, factor):
    """Squares of the gradients that the rank holds before they are clipped, with this factor or as `hfsdp` has set it."""
    trained, norms = _sharded(torch.float32), []
    for group in trained.model.param_and_grad_buffer.parameter_groups:
        if factor != "set":
            group.hfsdp_helper_gbuf.gradient_scaling_factor = factor
    trained._clip = lambda to: norms.append(sum(part.square().sum().item() for part in trained._gradients()))
    trained.step([batch(0, rank)])
    return norms


@pytest.mark.slow
def test_the_library_sums_gradients_over_the_ranks_where_it_says_that_it_averages_them():
    """It leaves the factor out of the buffers that only HFSDP has. Adam does not see it; clipping does."""
    left_out, ours = (launch(_norms, 4, factor, timeout_s=100) for factor in (None, "set"))
    for summed, mean in zip(left_out, ours, strict=True):
        assert summed == [16 * each for each in mean], "a power of two changes no digit"


def _without_cuda(rank, world):
    megatron.hfsdp(GPT(SHAPE), FOUR, trainer.Training({"lr": 1e-2}))


def test_without_cuda_it_says_what_is_missing():
    with pytest.raises(RankError, match="Megatron-FSDP needs CUDA, found device cpu"):
        launch(_without_cuda, 4, timeout_s=100)
