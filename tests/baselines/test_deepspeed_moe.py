"""DeepSpeed's expert parallelism decodes the tokens of one process, in buffers padded to the fullest expert."""

import numpy as np
import pytest
import torch
from moe_decoding import build, config

pytest.importorskip("deepspeed")

from repro.baselines.deepspeed import prepare
from repro.baselines.deepspeed_moe import DeepSpeedDecoder
from repro.comm import Communicator
from repro.exflow.recording import record_routing
from repro.launch import launch
from repro.models.gpt_moe import generate
from repro.topology import Level, Topology

TOPOLOGY = Topology((Level("package", 2), Level("node", 1), Level("cluster", 2)))
RANKS, NEW, REQUESTS = 4, 5, 8


def model(*sizes):
    return build(config(*sizes), torch.float32)


PROMPTS = list(torch.randint(40, (REQUESTS, 6), generator=torch.Generator().manual_seed(1)))


def decode(rank, world_size, top_k):
    decoder = DeepSpeedDecoder(model(top_k), Communicator(TOPOLOGY))
    return decoder.generate(PROMPTS, NEW), decoder.meter.iterations


@pytest.mark.parametrize("top_k", [1, 2])
def test_deepspeed_decodes_the_tokens_of_one_process(top_k):
    prepare()
    expected = torch.stack([generate(model(top_k), prompt, NEW) for prompt in PROMPTS])
    ranks = launch(decode, RANKS, top_k, timeout_s=120)
    for tokens, iterations in ranks:
        assert torch.equal(tokens, expected)
        assert all({"attention", "gate", "all_to_all", "expert", "head"} <= each.parts.keys() for each in iterations)
    row = 8 * 16 * 4 * (RANKS - 1)  # a token for each expert, from every rank to the three others
    for step, buffers in enumerate(buffer_lengths(model(top_k), expected)):
        nbytes = sum(sum(iterations[step].sent["all_to_all"].values()) for _, iterations in ranks)
        assert nbytes == 2 * buffers * row  # there and back


def buffer_lengths(decoder, generated):
    """Of each iteration, the layers' buffers together: as long as the fullest expert of any rank needs."""
    with record_routing(decoder) as recording:
        decoder(torch.cat([torch.stack(PROMPTS), generated], dim=1)[:, :-1])
    experts = recording.trace().experts.reshape(RANKS, REQUESTS // RANKS, 6 + NEW - 1, 3, -1)
    for position in range(6, 6 + NEW - 1):
        visits = experts[:, :, position].transpose(0, 2, 1, 3).reshape(RANKS, 3, -1)
        yield sum(max(np.bincount(visits[rank, layer]).max() for rank in range(RANKS)) for layer in range(3))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [((3, 8), "top_k is 3, deepspeed.moe knows 1 and 2"), ((1, 6), "6 experts cannot be shared evenly by 4")],
)
def test_what_deepspeed_lacks_is_refused(sizes, says):
    def refused(rank, world_size):
        DeepSpeedDecoder(model(*sizes), Communicator(TOPOLOGY))

    with pytest.raises(RuntimeError, match=says):
        launch(refused, RANKS, timeout_s=60)
