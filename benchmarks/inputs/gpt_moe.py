"""Train a GPT-MoE with the experiment `moe_train`, and keep its weights and a trace of its routing:

    python benchmarks/inputs/gpt_moe.py data/gpt_moe_8e.safetensors data/gpt_moe_routing_8e.npz --set experts=8 [--records FOLDER]

`--set` as for `repro run moe_train`; `--records`: write the record of this very run below FOLDER, as the workflow would. The trace is
of the weights as saved, in 16 bits, on windows spread over both texts: of the part trained on and of the held-out part. The same
sizes, seed and number of threads give the same bytes on the same processor and version of torch.
"""

import argparse
from pathlib import Path

import numpy as np
import yaml

from repro.exflow.recording import record_routing
from repro.experiments.common.texts import FILES, read, windows
from repro.experiments.moe_train import MoeTrain
from repro.experiments.moe_train.routing import route
from repro.experiments.moe_train.run import train
from repro.jobs import runner
from repro.models import gpt_moe_checkpoint as checkpoint
from repro.models.gpt_moe import GPTMoE
from repro.plan import jobs as plan

PARTS = ("train", "held_out")


def record_trace(model: GPTMoE, path: Path, tokens: int) -> None:
    """Route `tokens` of each text and part. Arrays: experts uint8 [tokens, layers], seq_len int32, and per sequence `domain` (index
    into `domain_names`) and `held_out`; `exflow.load_trace` reads it."""
    domain, held_out = [], []
    with record_routing(model) as recording:
        for number, name in enumerate(FILES):
            text = read(name)
            for part in PARTS:
                sequences = windows(getattr(text, part), tokens, model.config.seq_len)
                route(model, sequences)
                domain += [number] * len(sequences)
                held_out += [part == "held_out"] * len(sequences)
    np.savez_compressed(
        path,
        experts=recording.trace().experts[:, :, 0],
        seq_len=np.full(len(domain), model.config.seq_len, np.int32),
        num_experts=np.int64(model.config.experts),
        domain=np.array(domain, np.uint8),
        domain_names=np.array(list(FILES)),
        held_out=np.array(held_out),
    )


def held_out_losses(model: GPTMoE, tokens: int) -> dict[str, float]:
    """Nats per byte of each text."""
    found = {}
    for name in FILES:
        sequences = windows(read(name).held_out, tokens, model.config.seq_len)
        found[name] = round(route(model, sequences).loss, 5)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--records", type=Path)
    options = parser.parse_args()
    values = {name: yaml.safe_load(value) for name, value in (setting.split("=", 1) for setting in options.set)}
    point = MoeTrain(**values)
    if options.records:
        name = plan.job_id("moe_train", point, 0)
        found = runner.run("moe_train", point, out=options.records / "moe_train" / f"{name}.json")
        assert found.status == "ok", found.detail
    model, _ = train(point)
    checkpoint.save(model, options.weights)
    saved = checkpoint.load(options.weights)
    record_trace(saved, options.trace, point.eval_tokens)
    print("held-out loss in 32 bits:", held_out_losses(model, point.eval_tokens))
    print("held-out loss as saved:  ", held_out_losses(saved, point.eval_tokens))


if __name__ == "__main__":
    main()
