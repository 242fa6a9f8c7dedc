"""`repro place` within a time limit, and when Ctrl-C comes: the best placement so far is written."""

import importlib
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from repro import cli, exflow
from repro.cli.place_options import compile_kernels

BUSY = 15.0  # seconds of computing at limits of two: bounds alone took 22 to 34 for each pair of layers


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory):
    """Makes a trace of many experts in which each prefers some of the next layer."""

    def make(experts, layers=4, tokens=20_000, k=1):
        rng = np.random.default_rng(0)
        path = tmp_path_factory.mktemp("traces") / "t.npz"
        follow = rng.permuted(np.tile(np.arange(experts), (layers, 1)), axis=1)
        trace = [rng.integers(experts, size=(tokens, k))]
        for order in follow[1:]:
            stray = rng.integers(experts, size=(tokens, k))
            trace.append(np.where(rng.random((tokens, k)) < 0.5, order[trace[-1]], stray))
        found = np.stack(trace, axis=1).astype(np.uint16)
        if k > 1:  # different experts
            found[:, :, 1] = np.where(found[:, :, 1] == found[:, :, 0], (found[:, :, 0] + 1) % experts, found[:, :, 1])
        np.savez(path, experts=found, num_experts=experts, seq_len=np.full(tokens // 100, 100))
        return path

    return make


@pytest.mark.parametrize(
    ("experts", "options"),
    [
        (512, "--gpus 8"),
        (512, "--gpus 8 --gpus-per-node 4 --extra-slots 2 --format vllm"),
        pytest.param(512, "--gpus 512", marks=pytest.mark.exhaustive),
        pytest.param(1024, "--gpus 8", marks=pytest.mark.exhaustive),
        pytest.param(1024, "--gpus 64 --gpus-per-node 8 --max-load 1.5", marks=pytest.mark.exhaustive),
    ],
)
def test_the_limit_is_for_the_whole_command(tmp_path, trace_file, experts, options):
    out, path = tmp_path / "p", trace_file(experts)
    compile_kernels(False, "--extra-slots" in options)  # not counted, as is said
    computing = time.process_time()
    found = CliRunner().invoke(
        cli.app, ["place", str(path), *options.split(), *f"--json --time-limit 2 --out {out}".split()]
    )
    assert found.exit_code == 0, found.output
    assert time.process_time() - computing < BUSY
    result = json.loads(found.stdout)
    assert 0 <= result["bound"] <= result["crossing_fraction"] + 1e-9 and 0 <= result["bound_share"] <= 1
    assert out.stat().st_size > experts
    if result["bound_share"] < 1:
        assert f"bound: complete for {result['bound_share']:.0%} of the pairs of layers" in found.stderr


def test_what_the_search_leaves_is_spent_on_the_bound(trace_file):
    """At 64 experts the quick bounds are complete within a limit that the search would use up."""
    path = trace_file(64)
    found = CliRunner().invoke(cli.app, ["place", str(path), "--gpus", "8", "--json", "--time-limit", "6"])
    result = json.loads(found.stdout)
    counts = exflow.transitions(exflow.load_trace(path))
    assert result["bound_share"] == 1 and exflow.lower_bound(counts, 8) <= result["bound"]
    assert result["bound"] <= result["crossing_fraction"]


def test_tokens_needed_says_that_its_searches_were_cut(trace_file):
    """The clock is short for 10^9 rounds of each search; without any there is time enough."""
    asked = ["place", str(trace_file(32, tokens=2_000)), "--gpus", "8", "--tokens-needed", "--json", "--time-limit"]
    cut, whole = (
        CliRunner().invoke(cli.app, [*asked, *time.split()]) for time in ("2 --rounds 1000000000", "600 --rounds 0")
    )
    assert cut.exit_code == whole.exit_code == 0, cut.output + whole.output
    assert json.loads(cut.stdout)["searches_cut"] == 16 and json.loads(whole.stdout)["searches_cut"] == 0
    assert "tokens: 16 of 16 searches were cut short" in cut.stderr and "cut" not in whole.stderr


SEARCHES = {
    "before the search": ("--gpus 8", "repro.exflow.search.portfolio:search"),
    "in an annealing": ("--gpus 8", "repro.exflow.search.anneal:_sweeps"),
    "in a counted search": ("--gpus 8 --rounds 1000000", "repro.exflow.search.portfolio:improve"),
    "between two levels": ("--gpus 8 --gpus-per-node 4", "repro.exflow.search.portfolio:_random"),
    "in an assignment": ("--gpus 32", "repro.exflow.search.chain:linear_sum_assignment"),
    "before an integer program": ("--gpus 8 --method exflow", "repro.exflow.highs:load"),
    "on whole tokens": ("--gpus 8 --objective gpus --method random", "repro.exflow.serving.fanout:_tables"),
    "while copies are placed": (
        "--gpus 8 --extra-slots 4 --format vllm --method random",
        "repro.exflow.search.joint:sweep",
    ),
    "in the bound": ("--gpus 8 --method random", "repro.exflow.bound:spectrum"),
}


def interrupting(monkeypatch, function, after=None):
    """Let a call of `function`, module:name, press Ctrl-C; the first one after `after` was called."""
    name, _, attribute = function.partition(":")
    module = importlib.import_module(name)
    original, pressed = getattr(module, attribute), []

    def call(*args, **options):
        if not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)
        return original(*args, **options)

    if after is None:
        monkeypatch.setattr(module, attribute, call)
    else:  # what compiles the kernels calls the function, too
        command = importlib.import_module("repro.cli.place")
        compiled = command.compile_kernels
        monkeypatch.setattr(
            command, "compile_kernels", lambda *what: (compiled(*what), monkeypatch.setattr(module, attribute, call))
        )
    return pressed


@pytest.mark.parametrize(("options", "function"), SEARCHES.values(), ids=SEARCHES)
def test_ctrl_c_leaves_the_best_placement(tmp_path, trace_file, monkeypatch, options, function):
    out, path = tmp_path / "p.csv", trace_file(32, k=2 if "objective" in options else 1)
    pressed = interrupting(monkeypatch, function, after="compile_kernels")
    arguments = ["place", str(path), *options.split(), *f"--json --time-limit 600 --out {out}".split()]
    found = CliRunner().invoke(cli.app, arguments)
    assert pressed and found.exit_code == 130, found.output
    assert f"interrupted: this is the best that was found until then, and is in {out}" in found.stderr
    result = json.loads(found.stdout)
    assert result["bound"] <= result["crossing_fraction"] + 1e-9
    places = out.read_text()
    if "vllm" in options:
        assert np.array(json.loads(places)).shape == (4, 8 * (32 // 8 + 4))
    else:
        gpus = int(options.split()[1])
        gpu = np.array([row.split(",")[1] for row in places.splitlines()[1:]], int).reshape(4, 32)
        assert (np.sort(gpu) == np.arange(32) // (32 // gpus)).all()


@pytest.mark.parametrize("mode", ["--pareto", "--tokens-needed"])
def test_ctrl_c_is_told_where_no_placement_is_written(trace_file, monkeypatch, mode):
    pressed = interrupting(monkeypatch, "repro.exflow.search.portfolio:search", after="compile_kernels")
    arguments = ["place", str(trace_file(32)), *f"--gpus 8 --json --time-limit 600 {mode}".split()]
    found = CliRunner().invoke(cli.app, arguments)
    assert pressed and found.exit_code == 130, found.output
    assert "interrupted: this is the best that was found until then\n" in found.stderr and json.loads(found.stdout)


def test_ctrl_c_before_a_placement_ends_without_one(tmp_path, trace_file, monkeypatch):
    out, path = tmp_path / "p.csv", trace_file(32)
    interrupting(monkeypatch, "repro.exflow:load_trace")
    found = CliRunner().invoke(cli.app, ["place", str(path), *f"--gpus 8 --out {out}".split()])
    assert found.exit_code == 130 and not found.stdout and not out.exists()


# Says when the search begins; a second argument makes it one long step, in which no clock is looked at.
CHILD = """
import sys, time
from repro.cli import app
from repro.exflow.search import portfolio
search = portfolio.search
def told(*args):
    print("there", file=sys.stderr, flush=True)
    time.sleep({sleep})
    return search(*args)
portfolio.search = told
app()
"""


@pytest.mark.parametrize("times", [1, 2])
def test_real_interrupts(tmp_path, trace_file, times):
    """The first ends the search, the second the process, whatever it is in."""
    out = tmp_path / "p.csv"
    child = subprocess.Popen(
        [
            *(sys.executable, "-c", CHILD.format(sleep=0 if times == 1 else 600), "place", str(trace_file(32))),
            *f"--gpus 8 --time-limit 600 --out {out}".split(),
        ],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    try:
        for word in ("there", "Ctrl-C again ends at once")[:times]:
            assert any(word in line for line in child.stderr)
            child.send_signal(signal.SIGINT)
        said = child.communicate(timeout=100)[1]
    finally:
        child.kill()
        child.wait()
    if times == 1:
        assert child.returncode == 130 and f"is in {out}" in said and out.exists(), said
    else:
        assert child.returncode == -signal.SIGINT and not out.exists()
