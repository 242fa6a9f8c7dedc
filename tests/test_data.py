"""The shipped inputs are the ones that the README describes, byte for byte and in shape."""

import hashlib
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from repro import exflow, paths
from repro.experiments.common.texts import FILES, read, windows
from repro.experiments.moe_train.routing import route
from repro.models import gpt_moe_checkpoint
from repro.models.gpt_moe import GPTMoEConfig

FOLDER = paths.root() / "data"  # what experiments and tests read
PACKAGED = paths.root() / "src/repro/scaling/data"  # what library code reads


def checksums(folder):
    return dict(reversed(line.split()) for line in (folder / "checksums.txt").read_text().splitlines())


@pytest.mark.parametrize("path", [folder / name for folder in (FOLDER, PACKAGED) for name in sorted(checksums(folder))])
def test_checksum(path):
    assert hashlib.sha256(path.read_bytes()).hexdigest() == checksums(path.parent)[path.name]


@pytest.mark.parametrize("folder", [FOLDER, PACKAGED])
def test_every_input_has_a_checksum_a_description_and_a_licence(folder):
    documents = {"README.md", "LICENSES.md", "checksums.txt"}
    inputs = {path.name for path in folder.iterdir() if path.is_file()} - documents
    assert inputs == set(checksums(folder))
    readme, licences = (folder / "README.md").read_text(), (folder / "LICENSES.md").read_text()
    assert all(f"`{name}`" in readme and f"`{name}`" in licences for name in inputs)


def test_published_numbers_are_described_and_belong_to_claims():
    files = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("published/*"))
    readme, claims = (FOLDER / "README.md").read_text(), (paths.root() / "config/claims.yaml").read_text()
    assert len(files) == 4 and all(f"`{name}`" in readme and f"published: data/{name}\n" in claims for name in files)
    numbers = pd.concat(pd.read_csv(FOLDER / name) for name in files)  # loading the claims checks each number
    assert numbers.columns.tolist() == ["claim", "label", "over", "x", "value", "unit", "tag"] and len(numbers) == 456
    assert numbers.claim.nunique() == 16 and not numbers.duplicated(["claim", "label", "x"]).any()


def test_gptoss_routing():
    with np.load(FOLDER / "gptoss20b_routing.npz", allow_pickle=False) as trace:
        experts, seq_len = trace["experts"], trace["seq_len"]
        assert experts.shape == (138431, 24, 4) and experts.dtype == np.uint8
        assert experts.max() == 31 and all((np.diff(np.sort(experts[:2000], axis=2), axis=2) > 0).all(axis=2).ravel())
        assert seq_len.shape == (470,) and seq_len.sum() == len(experts)
        assert (seq_len.min(), seq_len.max()) == (30, 511)
        assert trace["finished"].sum() == 289
        for name, count in (("dataset", 11), ("category", 133)):
            assert len(trace[f"{name}_names"]) == count
            assert trace[name].min() >= 0 and trace[name].max() < count
        assert trace["first_pos"].shape == trace["source_row"].shape == (470,)


def test_azure_trace():
    trace = pd.read_csv(FOLDER / "azure23_conv.csv", encoding="utf-8-sig", parse_dates=["TIMESTAMP"])
    assert list(trace.columns) == ["TIMESTAMP", "ContextTokens", "GeneratedTokens"] and len(trace) == 19366
    assert trace.TIMESTAMP.is_monotonic_increasing
    assert trace.TIMESTAMP.iloc[-1] - trace.TIMESTAMP.iloc[0] < pd.Timedelta(hours=1)
    assert (trace.ContextTokens.min(), trace.ContextTokens.max()) == (2, 14050)
    assert (trace.GeneratedTokens.min(), trace.GeneratedTokens.max()) == (7, 1000)


def test_sharegpt_lengths():
    lengths = pd.read_csv(FOLDER / "sharegpt_lengths_llmservingsim.csv")
    assert list(lengths.columns) == ["arrival_time_ns", "input_toks", "output_toks"] and len(lengths) == 300
    assert lengths.arrival_time_ns.is_monotonic_increasing
    assert (lengths.input_toks.min(), lengths.input_toks.max()) == (262, 3998)
    assert (lengths.output_toks.min(), lengths.output_toks.max()) == (512, 1021)


def test_text_is_plain_ascii():
    text = (FOLDER / "tinyshakespeare.txt").read_bytes()
    assert len(text) == 1_115_394 and text.isascii() and len(set(text)) == 65


def test_python_text_is_18_modules_of_the_standard_library():
    text = (FOLDER / "python_stdlib.txt").read_bytes()
    assert len(text) == 1_163_394 and text.isascii()
    titles = [line for line in text.decode().splitlines() if line.startswith("# CPython: Lib/")]
    assert len(titles) == 18 and titles[0].endswith("Lib/argparse.py") and titles[-1].endswith("Lib/unittest/case.py")
    assert not re.search(rb"(?i)copyright|licen[sc]e", text)  # no notice but Python's own, which LICENSES.md has


@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="the text is of CPython 3.11.7")
def test_python_text_is_what_its_script_makes(tmp_path):
    made = tmp_path / "made.txt"
    subprocess.run([sys.executable, paths.root() / "benchmarks/inputs/python_stdlib.py", made], check=True)
    assert made.read_bytes() == (FOLDER / "python_stdlib.txt").read_bytes()


def routing_of_a_gpt_moe(name, experts):
    """The shipped trace, and its sequences [1024, 128, 8] with the domain and part of each."""
    trace = exflow.load_trace(FOLDER / name)
    assert trace.experts.shape[:2] == (131072, 8) and trace.experts.dtype == np.uint8 and trace.num_experts == experts
    with np.load(FOLDER / name, allow_pickle=False) as file:
        assert file["domain_names"].tolist() == ["shakespeare", "python"] and set(file["seq_len"]) == {128}
        domain, held_out = file["domain"], file["held_out"]
    kinds = [(d, part) for d in (0, 1) for part in (False, True) for _ in range(256)]
    assert list(zip(domain.tolist(), held_out.tolist(), strict=True)) == kinds
    return trace.experts.reshape(1024, 128, 8), domain, held_out


@pytest.mark.parametrize("name", [name for name in checksums(FOLDER) if name.endswith(".safetensors")])
def test_gpt_moe_weights_route_as_their_trace_says(name):
    """Sums in another order may flip a near tie."""
    experts = int(re.search(r"\d+", name).group())
    model = gpt_moe_checkpoint.load(FOLDER / name)
    assert model.config == GPTMoEConfig(layers=8, hidden=64, experts=experts, expert_hidden=64)
    choices, domain, held_out = routing_of_a_gpt_moe(f"gpt_moe_routing_{experts}e.npz", experts)
    for number, name in enumerate(FILES):
        sequences = windows(read(name).held_out, 32768, 128)[:4]
        found = route(model, sequences)
        told = choices[(domain == number) & held_out][:4].reshape(-1, 8)
        assert (found.trace.experts == told).mean() > 0.995
        assert found.loss < 2.0  # nats per byte; bigrams alone give 2.4


def test_routing_of_a_gpt_moe_that_knows_one_text():
    routing_of_a_gpt_moe("gpt_moe_routing_16e_shakespeare.npz", 16)
