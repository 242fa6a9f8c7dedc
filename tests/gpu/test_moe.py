"""GPT-MoE on a GPU: under autocast its experts are one grouped product."""

import pytest
import torch

from repro.models.gpt_moe import Experts, GPTMoE, GPTMoEConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]


def test_training_in_16_bits_follows_training_in_32(monkeypatch):
    losses, calls, at_once = [], [], Experts._at_once
    monkeypatch.setattr(Experts, "_at_once", lambda *given: calls.append(1) or at_once(*given))
    for mixed in (False, True):
        torch.manual_seed(0)
        model = GPTMoE(GPTMoEConfig(layers=2, hidden=64, seq_len=64, expert_hidden=64)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        tokens = torch.randint(8, (8, 65), generator=torch.Generator().manual_seed(0)).cuda()
        found = []
        for _ in range(30):
            with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(torch.tensor(found))
    assert len(calls) == 30 * 2  # of the second training, in each of two layers
    assert losses[0][-1] < 0.6 * losses[0][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=0.05, atol=0)
