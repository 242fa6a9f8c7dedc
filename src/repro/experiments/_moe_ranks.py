"""What moe_decode runs: the model and its placement in the parent, decoding on every rank, and one process to compare with."""

import copy
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from repro import exflow, paths
from repro.comm.communicator import Communicator
from repro.emulate.netns import Fabric
from repro.exflow.moe import Decoder
from repro.exflow.moe.cache import KeysValues
from repro.exflow.moe.meter import Iteration
from repro.exflow.recording import record_routing
from repro.experiments._moe_training import FILES, read
from repro.experiments._traces import ROUNDS
from repro.experiments.moe_decode import MoEDecodePoint
from repro.launch.joined import place_in_job
from repro.models import gpt_moe_checkpoint
from repro.models.gpt_moe import GPTMoE, generate

WARM_UP = 2  # iterations that are not timed: first messages between ranks
CHECKED = 16  # requests whose tokens one process decodes again
COSTS = (1.0, 4.0, 16.0)  # of a row over the levels, for the placement: what they take on links of 16 : 4 : 1


@dataclass
class Report:
    """What one rank returns."""

    tokens: Tensor
    free: list[Iteration]
    aligned: list[Iteration]
    cache_bytes: int


def build(point: MoEDecodePoint) -> GPTMoE:
    """The shipped model of as many experts, or one with random weights."""
    dtype = getattr(torch, point.dtype)
    if point.weights == "trained":
        model = gpt_moe_checkpoint.load(paths.data(f"gpt_moe_{point.experts}e.safetensors"))
        return model.to(_device(), dtype)
    torch.manual_seed(point.seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(
        dtype
    )  # 64 experts of the paper's sizes are 52 GB in fp32: made as they are used, and where
    try:
        with torch.device(_device()):
            return GPTMoE(point.random_sizes).eval()
    finally:
        torch.set_default_dtype(default)


def prompts(point: MoEDecodePoint) -> list[Tensor]:
    """The beginning of each request: slices of held-out text, drawn by `seed`, int64 [prompt]."""
    held_out = [read(name).held_out for name in FILES]
    draw = np.random.default_rng([point.seed, 1])
    return [_slice(held_out[r % len(held_out)], point.prompt, draw) for r in range(point.ranks * point.requests)]


def placed(point: MoEDecodePoint, model: GPTMoE) -> np.ndarray:
    """The rank of every expert, int64 [layers, experts], placed by the model's routing of `profile_tokens` of training text."""
    length = min(128, model.config.seq_len)
    train = [read(name).train for name in FILES]
    draw = np.random.default_rng([point.seed, 2])
    rows = [_slice(train[r % len(train)], length, draw) for r in range(max(1, point.profile_tokens // length))]
    with torch.no_grad(), record_routing(model) as recording:
        model(torch.stack(rows).to(model.head.weight.device))
    counts = exflow.transitions(recording.trace().top(1))
    return exflow.place(counts, point.topology, method=point.placement, seed=point.seed, rounds=ROUNDS, costs=COSTS).gpu


def decode(
    rank: int,
    world_size: int,
    point: MoEDecodePoint,
    model: GPTMoE,
    gpu: np.ndarray,
    prompts: list[Tensor],
    memory: KeysValues | None,
    network: Fabric | None,
) -> Report:
    """One rank: decode everything twice, as fast as it goes, and with all ranks meeting before each exchange."""
    model = copy.deepcopy(model)  # the decoder keeps its own experts only; the whole model is compared with afterwards
    agreed = torch.from_numpy(gpu).to(_device())
    dist.broadcast(agreed, 0)  # in a job every rank has searched, and a search that its time limit cut may differ
    communicator = Communicator(point.topology, device=_device())
    if point.system == "deepspeed":
        from repro.baselines.deepspeed_moe import DeepSpeedDecoder

        decoder = DeepSpeedDecoder(model, communicator)
    else:
        decoder = Decoder(model, agreed.cpu().numpy(), communicator, point.system, point.keys_values, memory)
    tokens = decoder.generate(prompts, point.new_tokens)
    free, decoder.meter.iterations = decoder.meter.iterations[WARM_UP:], []
    decoder.meter.aligned = True
    decoder.generate(prompts, point.new_tokens)
    return Report(tokens.cpu(), free, decoder.meter.iterations[WARM_UP:], decoder.cache.nbytes)


def equal_to_one_process(point: MoEDecodePoint, model: GPTMoE, prompts: list[Tensor], tokens: Tensor) -> float:
    """Share of a sample of requests whose tokens, [requests, new_tokens], one process gives as well, without cache or other requests."""
    chosen = np.linspace(0, len(prompts) - 1, min(CHECKED, len(prompts))).astype(int).tolist()
    device = model.head.weight.device
    same = [torch.equal(generate(model, prompts[r].to(device), point.new_tokens).cpu(), tokens[r]) for r in chosen]
    return sum(same) / len(same)


def _device() -> str:
    """The GPU of this rank in a job; ranks that `launch` starts here share the CPU."""
    return "cuda" if place_in_job() is not None and torch.cuda.is_available() else "cpu"


def _slice(text: Tensor, length: int, draw: np.random.Generator) -> Tensor:
    start = int(draw.integers(len(text) - length))
    return text[start : start + length].long()
