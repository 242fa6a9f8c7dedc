"""The table of total times that the queue model predicts."""

from pathlib import Path

import pytest
from claims_made_up import bad, ok

from repro.experiments.sarathi_prefill import POLICIES
from repro.report.docs import queue


def run(errors, chunk=64, **about):
    metrics = {f"{policy}_error_seconds": error for policy, error in zip(POLICIES, errors, strict=True)}
    sizes = {"model": "random-40m", "prompt_tokens": 240, "output_tokens": 30, "chunk": chunk}
    sizes |= {"dtype": "bfloat16", "requests": 18, "slots": 9}
    return ok("sarathi_prefill", metrics=metrics, measures="throughput", **sizes, **about)


def predicted(*runs):
    return queue.predicted({Path(f"{number}.json"): run for number, run in enumerate(runs)})


def test_errors_of_a_setting_are_those_of_all_its_runs():
    single, repeated = run([0, 0, 0, 0.2], chunk=32), [run([e, 0.1, -0.1, 0.101]) for e in (0.05, -0.2)]
    other = (
        ok("sarathi_prefill", metrics={"token_alone_s": 1.0}, measures="piggyback"),
        bad(measures="throughput").model_copy(update={"experiment": "sarathi_prefill"}),
    )
    first, second = predicted(single, *repeated, *other)
    assert (first.name, first.runs, first.errors["chunked"]) == ("`random-40m`, 240 + 30, 64", 2, [-0.2, 0.05])
    assert first.within == 5 and (second.runs, second.within) == (1, 3)


def test_a_setting_with_a_run_by_older_code_is_marked(monkeypatch):
    monkeypatch.setattr(queue.provenance, "older", lambda runs: {path for path in runs if path.name == "1.json"})
    assert [each.older for each in predicted(run([0] * 4), run([0] * 4), run([0] * 4, chunk=32))] == [True, False]


def test_without_a_run_the_page_is_named():
    with pytest.raises(ValueError, match=r"docs/flover\.md shows sarathi_prefill"):
        predicted()
