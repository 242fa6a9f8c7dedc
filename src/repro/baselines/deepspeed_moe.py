"""DeepSpeed's own expert parallelism (`deepspeed.moe.MoE`, two all-to-alls per layer) around the same model and the
same loop.

Every expert gets a buffer as long as the fullest expert of any rank needs, a size that an all-reduce per layer tells
(counted as gate, which makes it). So no token is dropped, and the tokens are those of the model. In that all-reduce
ranks also wait for the slowest one, for which our exchanges have a barrier of their own. It is not counted as routing
of DeepSpeed's layers, so what our routing saves over theirs is understated.
"""

import contextlib
import io

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from repro.baselines import deepspeed
from repro.comm.communicator import Communicator
from repro.exflow.moe import Decoder
from repro.exflow.moe.meter import Meter
from repro.exflow.paper import contiguous
from repro.models.gpt_moe import GPTMoE, MoEBlock


class DeepSpeedDecoder(Decoder):
    """`repro.exflow.moe.Decoder` in mode two_all_to_alls, with DeepSpeed's layers for router and experts. These are in
    rank order, as DeepSpeed has them.

    Every rank must be home to a request. ValueError for top_k above 2 or experts that the ranks cannot share evenly,
    which DeepSpeed does not have; ImportError without DeepSpeed.
    """

    def __init__(self, model: GPTMoE, communicator: Communicator) -> None:
        config, ranks = model.config, dist.get_world_size()
        if config.top_k > 2:
            raise ValueError(f"top_k is {config.top_k}, deepspeed.moe knows 1 and 2")
        if config.experts % ranks:
            raise ValueError(f"{config.experts} experts cannot be shared evenly by {ranks} ranks")
        super().__init__(model, contiguous(config.layers, config.experts, ranks), communicator, "two_all_to_alls")
        deepspeed.set_up_process(communicator.topology)
        self._layers = nn.ModuleList(_layer(block, config.experts, config.top_k, self.meter) for block in model.blocks)
        _meter_all_to_alls(self.meter)

    def _out_and_back(self, layer: int, x: Tensor, most: int) -> Tensor:
        with self.meter.part("gate"):  # and everything around the parts that are metered inside
            out, *_ = self._layers[layer](self.model.blocks[layer].norm2(x))
        return out


class _Expert(nn.Module):
    """One expert of a `GPTMoE`, [.., hidden] to the same."""

    def __init__(self, up: Tensor, down: Tensor, meter: Meter) -> None:
        super().__init__()
        self.up, self.down, self.meter = nn.Parameter(up), nn.Parameter(down), meter

    def forward(self, x: Tensor) -> Tensor:
        with self.meter.part("expert"):
            return F.gelu(x @ self.up) @ self.down


def _layer(block: MoEBlock, experts: int, k: int, meter: Meter) -> nn.Module:
    """DeepSpeed's layer with the weights of this rank's part of `block`."""
    up, down = block.experts.up.data, block.experts.down.data
    moe = deepspeed.private("deepspeed.moe.layer", "MoE")(
        up.shape[1],
        nn.Identity(),
        experts,
        ep_size=dist.get_world_size(),
        k=k,
        min_capacity=0,
        drop_tokens=False,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # it prints when it makes the process group
        moe.set_deepspeed_parallelism()
    layer = deepspeed.private(moe, "deepspeed_moe")
    layer.experts.deepspeed_experts = nn.ModuleList(_Expert(*each, meter) for each in zip(up, down, strict=True))
    layer.gate.wg.weight.data = block.router.weight.data.float()
    return moe.eval().to(up.device)


def _meter_all_to_alls(meter: Meter) -> None:
    """Meter DeepSpeed's all-to-alls, and count their bytes: every rank sends as much to every other."""
    sharded = deepspeed.private("deepspeed.moe.sharded_moe")
    original = deepspeed.private("deepspeed.moe.sharded_moe", "_AllToAll")
    original = getattr(original, "unmetered", original)  # of an earlier decoder of this process

    class Metered:
        unmetered = original

        @staticmethod
        def apply(group: dist.ProcessGroup, x: Tensor) -> Tensor:
            with meter.part("all_to_all"):
                for peer in range(dist.get_world_size()):
                    meter.ledger.count(peer, x.nbytes // dist.get_world_size())
                return original.apply(group, x)

    sharded._AllToAll = Metered
