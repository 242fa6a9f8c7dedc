"""The programs printed in the documents run as they stand."""

import os
import re
import subprocess
import sys

import torch
from moe_models import build

from repro import paths
from repro.models.llama import Llama, LlamaConfig


def program(document: str, holding: str) -> str:
    """The one Python block of a document that holds these words."""
    blocks = re.findall(r"```python\n(.*?)```", (paths.root() / document).read_text(), re.DOTALL)
    (found,) = [block for block in blocks if holding in block]
    return found


def test_decoding_on_four_ranks(tmp_path):
    (tmp_path / "decode.py").write_text(program("docs/exflow.md", "Decoder"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, tmp_path / "decode.py"],
        cwd=paths.root(),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line.split(" ", 1)[1].split(" {")[0] for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert len(said) == 4 and len(set(said)) == 1 and len(eval(said[0])) == 32  # every rank says the same 32 bytes


def test_placing_the_experts_of_a_transformers_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokens = torch.arange(60).view(4, 15)
    names = {"model": build("Mixtral"), "inputs": {"input_ids": tokens}}
    before = names["model"](tokens).logits
    exec(program("README.md", "permute_experts").replace("max_new_tokens=200", "max_new_tokens=20"), names)
    assert (tmp_path / "reordered" / "config.json").exists()
    torch.testing.assert_close(names["model"](tokens).logits, before)


def test_predicting_a_real_model(capsys):
    names = {"model": Llama.random(LlamaConfig(layers=1, width=32, heads=4, kv_heads=2, ffn=48, vocab=61))}
    exec(program("docs/flover.md", "Batches"), names)
    assert capsys.readouterr().out.count("all done after") == 3


def test_serving_a_real_model(capsys):
    exec(program("docs/flover.md", "import Engine"), {})
    said = capsys.readouterr().out
    ids = {line.split()[0] for line in said.splitlines() if line.split()[1:2] in (["stop"], ["length"])}
    assert "Paris" in said and ids >= {"0", "1"}
