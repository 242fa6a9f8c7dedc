"""The engine on GPUs: one rank on one GPU against plain torch, and several ranks against DDP over NCCL (RCCL)."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from ddp_reference import Setting, batch

from repro.launch import launch
from repro.topology import frontier
from repro.zero import ZeroOptimizer
from repro.zero import plan as plans

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.gpu
one = pytest.mark.skipif(GPUS < 1, reason="needs a CUDA or ROCm GPU")
several = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, found {GPUS}")


def _on_one_gpu(rank: int, world: int, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    setting, losses = Setting(steps=6), []
    for ours in (True, False):
        model = setting.model().cuda()
        if ours:
            plan = plans.hierarchical(frontier(1, 1, 1))
            optimizer = ZeroOptimizer(model, plan, weight_dtype=dtype, max_grad_norm=0.4, lr=3e-3)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        found = []
        for step in range(setting.steps):
            loss = model(*(x.cuda() for x in batch(step, 0)))
            loss.backward()
            if not ours:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    return losses[0], losses[1]


@one
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 5e-3)], ids=str
)
def test_one_rank_trains_like_plain_torch(dtype, rtol):
    found, expected = launch(_on_one_gpu, 1, dtype, threads=2, timeout_s=120)[0]  # two threads: spawned, as CUDA needs
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0)


SEVERAL = """
    import torch, torch.distributed as dist
    from ddp_reference import Setting, batch
    from repro.launch import launch
    from repro.topology import frontier
    from repro.zero import ZeroOptimizer, plan as plans

    def train(rank, world):
        setting, curves = Setting(steps=8, micro_batches=(1, 2)), []
        topology = frontier(1, 1, world) if world < 4 else frontier(world // 4, 2, 2)
        chosen = [None, *(plans.unquantised(plans.named(name, topology)) for name in ("zero3", "hierarchical", "mics"))]
        for plan in [*chosen, plans.zeropp(topology), plans.hierarchical(topology)]:
            model = setting.model().cuda()
            if plan is None:
                model = torch.nn.parallel.DistributedDataParallel(model)
                optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            else:
                optimizer = ZeroOptimizer(model, plan, weight_dtype=torch.float32, max_grad_norm=0.4, lr=3e-3)
            curve = []
            for step in range(setting.steps):
                for micro_batch in range(count := (1, 2)[step % 2]):
                    loss = model(*(x.cuda() for x in batch(step, rank, micro_batch))) / count
                    loss.backward()
                if plan is None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)
                optimizer.step()
                optimizer.zero_grad()
                curve.append(loss.item())
            curves.append(curve)
        return curves

    world = int(__import__("os").environ["WORLD_SIZE"])
    for reference, *unquantised, zeropp, hierarchical in launch(train, world):
        for run in unquantised:
            torch.testing.assert_close(run, reference, rtol=1e-4, atol=0)
        for run in (zeropp, hierarchical):
            torch.testing.assert_close(run, reference, rtol=5e-2, atol=0)
"""


@several
def test_several_ranks_give_the_losses_of_ddp_over_nccl(tmp_path):
    script = tmp_path / "several.py"
    script.write_text(textwrap.dedent(SEVERAL))
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(GPUS), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
