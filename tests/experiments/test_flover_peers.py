"""Fused decoding beside other servers, with stand-ins for them: tiny programs that keep to the protocol, or do not."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from pydantic import ValidationError

from repro import experiments
from repro.experiments.base import MissingHardware
from repro.experiments.flover_peers import EXPERIMENT, PeersPoint, catalogue, models, processes, run
from repro.experiments.flover_peers.catalogue import ENGINES, Engine
from repro.experiments.flover_peers.engines import protocol
from repro.experiments.flover_peers.engines.protocol import Answer, Event, Job, Request, Result
from repro.jobs import runner

# Serves at once what has arrived, and keeps what it was asked. A token is the request's number.
STAND_IN = """
import os, sys, pathlib
sys.path.insert(0, {protocol!r})
import protocol
from protocol import Event

class Server:
    def __init__(self):
        self.waiting = []
    @property
    def busy(self):
        return bool(self.waiting)
    def submit(self, request):
        self.waiting.append(request)
    def step(self, seconds):
        done, self.waiting = self.waiting, []
        return [Event(r.id, [r.id] * r.output_tokens, True) for r in done]

def start(job):
    asked = pathlib.Path(sys.argv[1]).read_text()
    with open({seen!r}, "a") as file:
        file.write(job.variant + " " + asked + chr(10))
    return lambda requests: protocol.serve(Server(), requests)

protocol.run(start, lambda: "stand-in 1")
"""
CRASHES = "import os, sys; print('out of luck', flush=True); os.kill(os.getpid(), 9)"
FAILS = "import sys; sys.exit('no such model')"
RUBBISH = "import sys; print('rubbish'); open(sys.argv[2], 'w').write({text!r})"
STAYS = """
import sys, threading, time
sys.path.insert(0, {protocol!r})
import protocol

def start(job):
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise ValueError("no room")

protocol.run(start, str)
"""
HANGS = "import os, subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
JOB = Job("model", "", "float32", 1, "", [Request(0, 0.0, [5, 6], 2)])


def answered(**changes):
    """A result of JOB with a fault."""
    answer = {"id": 0, "start_s": 0.0, "first_token_s": 0.1, "finish_s": 0.2, "tokens": [1, 2]} | changes
    return json.dumps({"version": "1", "load_s": 0.1, "peak_bytes": 1, "requests": [answer]})


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Makes a program an engine of the package's own environment."""
    monkeypatch.setattr(catalogue, "SCRIPTS", tmp_path)
    monkeypatch.setattr(processes, "SCRIPTS", tmp_path)

    def made(text, name="stand_in"):
        (tmp_path / f"{name}.py").write_text(text)
        return Engine(name, f"{name}.py", name)

    return made


@pytest.fixture
def stand_ins(engine, tmp_path, monkeypatch):
    """Every engine is a stand-in, and no model is made; what they were asked, in order."""
    seen = tmp_path / "seen"
    text = STAND_IN.format(protocol=str(Path(run.__file__).parent / "engines"), seen=str(seen))
    for name in ENGINES:
        monkeypatch.setitem(ENGINES, name, engine(text, name))
    monkeypatch.setattr(models, "folder_of", lambda name, dtype, cache: tmp_path / "model")
    monkeypatch.setattr(run, "_cores", lambda: sorted(os.sched_getaffinity(0))[:1])

    def asked():
        lines = [line.split(" ", 1) for line in seen.read_text().splitlines()]
        return [(variant, json.loads(job)["requests"]) for variant, job in lines]

    return asked


@pytest.fixture
def unlocked(monkeypatch):
    """Nothing here is a measurement: it need not wait for one."""
    monkeypatch.setattr(runner, "machine", lambda timed: contextlib.nullcontext())


def served(program):
    return processes.serve(program, JOB, [0], Path("cache"))


def test_every_pass_serves_the_same_requests_at_the_same_times(stand_ins):
    point = PeersPoint(engine="vllm_eager", model="random-40m", requests=6, length_scale=0.02, interval_t1=0.5)
    outcome = EXPERIMENT.check(EXPERIMENT.run(point))
    (_, alone), *passes = stand_ins()
    assert [variant for variant, _ in passes] == ["fused", "vllm_eager", "fused"]
    requests = passes[0][1]
    assert all(asked == requests for _, asked in passes) and len(requests) == 6 and len(alone) == 12
    gap = outcome.metrics.mean_interval_seconds
    assert gap == pytest.approx(0.5 * outcome.metrics.single_request_seconds)
    assert [r["arrival_s"] for r in requests] == pytest.approx([i * gap for i in range(6)])
    assert {(len(r["prompt"]), r["output_tokens"]) for r in requests} == {(8, 10)}
    assert outcome.evidence == "measured" and outcome.conditions["version"] == "stand-in 1"
    assert outcome.metrics.tokens_equal_fraction == 1 and outcome.metrics.peak_bytes > 1e6
    assert len(outcome.series) == 18


def test_another_seed_has_other_prompts_and_lengths():
    several = [run._requests(PeersPoint(workload="uniform", model="random-40m", seed=s), 0.5) for s in (0, 0, 1)]
    assert several[0] == several[1] != several[2]
    lengths = [request.output_tokens for request in several[0]]
    assert len(set(lengths)) > 10 and min(lengths) >= 16 and max(lengths) <= 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CRASHES, r"stand_in ended by signal SIGKILL, and printed\nout of luck"),
        (FAILS, r"ended by status 1, and printed\nno such model"),
        (RUBBISH.format(text="rubbish"), r"(?s)no result that can be used: .*JSON.*printed\nrubbish"),
        (RUBBISH.format(text=answered(tokens=[1])), "request 0: 1 tokens, asked for 2"),
        (RUBBISH.format(text=answered(tokens=["a", "b"])), "valid integer"),
        (RUBBISH.format(text=answered(finish_s=-1.0)), "request 0: done after -1.0 s, arrived at 0.0 s"),
        (RUBBISH.format(text=answered(finish_s=float("nan"))), "request 0: done after nan s"),
        (RUBBISH.format(text=answered(id=7)), "request 0: None tokens"),
        ("pass", r"(?s)no result that can be used: .*No such file.*printed nothing"),
    ],
)
def test_what_an_engine_does_wrong_is_said(engine, text, message):
    with pytest.raises(processes.EngineFailed, match=message):
        served(engine(text))


def children():
    return [each for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]


def test_an_engine_that_hangs_is_ended_with_its_processes(engine):
    before = {each.pid for each in children()}
    with pytest.raises(TimeoutError), runner.limited(1.0):
        served(engine(HANGS))
    assert {each.pid for each in children()} <= before


def test_an_engine_that_fails_ends_though_a_thread_of_its_does_not(engine):
    text = STAYS.format(protocol=str(Path(run.__file__).parent / "engines"))
    with (
        runner.limited(60.0),
        pytest.raises(processes.EngineFailed, match=r"(?s)ended by status 1.*ValueError: no room"),
    ):
        served(engine(text))


def test_answers_to_what_nobody_asked_are_refused(engine):
    twice = json.loads(answered())
    twice["requests"] *= 2
    with pytest.raises(processes.EngineFailed, match="2 answers, asked for 1"):
        served(engine(RUBBISH.format(text=json.dumps(twice))))


def test_a_process_that_ends_while_peaks_are_forgotten_is_passed_over(monkeypatch, tmp_path):
    def ended(self, text):
        raise ProcessLookupError

    monkeypatch.setattr(protocol, "_group", lambda: [tmp_path])
    monkeypatch.setattr(Path, "write_text", ended)
    protocol.forget_peak()


def test_an_engine_ends_when_who_started_it_is_killed(tmp_path):
    """Nobody is left to end it, so it must see that its standard input ends."""
    folder = str(Path(run.__file__).parent / "engines")
    script = f"import sys; sys.path.insert(0, {folder!r}); import protocol, time, json, os\n"
    script += "def start(job):\n    print(os.getpid(), flush=True)\n    time.sleep(600)\nprotocol.run(start, str)"
    (tmp_path / "slow.py").write_text(script)
    JOB.write(tmp_path / "job")
    command = [sys.executable, str(tmp_path / "slow.py"), str(tmp_path / "job"), str(tmp_path / "result")]
    parent = f"import subprocess; subprocess.Popen({command!r}, stdin=subprocess.PIPE, start_new_session=True).wait()"
    starter = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    pid = int(starter.stdout.readline())
    starter.kill()
    starter.wait()
    for _ in range(600):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("it lives")


def test_a_server_that_is_not_installed_is_skipped_with_the_command(tmp_path, monkeypatch, unlocked):
    monkeypatch.setattr(catalogue, "environment_of_peers", lambda: tmp_path)
    for name in ("vllm_compiled", "llama_cpp"):
        with pytest.raises(MissingHardware, match="`make peers`"):
            EXPERIMENT.run(PeersPoint(engine=name))
    found = runner.run("flover_peers", PeersPoint(engine="llama_cpp"), out=tmp_path / "record.json")
    assert (found.status, found.cause) == ("skipped", "missing_hardware") and "`make peers`" in found.detail


def test_the_record_of_a_crash_has_its_last_words(stand_ins, engine, monkeypatch, unlocked):
    monkeypatch.setitem(ENGINES, "vllm_eager", engine(CRASHES, "vllm_eager"))
    point = PeersPoint(engine="vllm_eager", model="random-40m", requests=1, length_scale=0.01)
    found = runner.run("flover_peers", point)
    assert found.status == "failed" and "out of luck" in found.detail and not found.metrics


def answers(*finished):
    return [Answer(i, 0.0, 1.0, seconds, tokens) for i, (seconds, tokens) in enumerate(finished)]


def test_numbers_of_known_passes():
    requests = [Request(0, 0.0, [1], 4), Request(1, 1.0, [1], 4)]
    fused = Result("1", 5.0, 100, answers((2.0, [1, 2, 3, 4]), (3.0, [1, 2, 3, 4])))
    again = Result("1", 7.0, 300, answers((4.0, [1, 2, 3, 4]), (5.0, [1, 2, 3, 4])))
    peer = Result("2", 9.0, 400, answers((8.0, [1, 9, 3, 4]), (6.0, [1, 2, 3, 4])))
    passes = {"fused, first": fused, "peer": peer, "fused, second": again}
    found = run.compared(requests, passes, 0.5, 0.1)
    assert (found.total_seconds, found.fused_total_seconds) == (8, 4)
    assert (found.latency_mean, found.fused_latency_mean) == ((8 + 5) / 2, (2 + 2 + 4 + 4) / 4)
    assert (found.tokens_per_s, found.peak_bytes, found.fused_peak_bytes) == (1, 400, 200)
    assert (found.tokens_equal_fraction, found.tokens_before_difference) == (0.5, (1 / 4 + 1) / 2)
    assert (found.fused_drift, found.ttft_mean, found.mean_interval_seconds) == (5 / 3, 0.5, 1)


def test_answers_that_come_in_one_piece_have_no_time_to_the_first_token():
    result = Result("1", 1.0, None, [Answer(0, 0.0, None, 2.0, [1])])
    found = run.served([Request(0, 0.0, [1], 1)], result)
    assert found.ttft_mean is None and found.peak_bytes is None and found.total_seconds == 2


def test_lone_requests_are_the_middle_of_the_lengths():
    requests = [Request(i, 0.0, [1], tokens) for i, tokens in enumerate((8, 1, 7, 2, 6, 3, 5, 4))]
    assert [request.output_tokens for request in run.lone(requests)] == [2, 4, 6, 8]
    assert run.lone(requests[:1]) == requests[:1]
    assert [request.output_tokens for request in run.lone(requests[:6])] == [1, 3, 6, 8]  # of 1, 2, 3, 6, 7, 8


def test_t1_is_that_of_a_median_round(monkeypatch):
    """Four requests a round; the second round has a slow moment."""
    took = [1, 1, 1, 1, 9, 1, 1, 1, 2, 2, 2, 2]
    ends = np.cumsum(took).tolist()
    monkeypatch.setattr(run, "_requests", lambda point, interval: [Request(i, 0.0, [1], 5) for i in range(32)])

    def serial(point, name, asked, cores):
        assert name == "serial" and len({request.id for request in asked}) == len(asked) == 12
        return Result("1", 1.0, None, [Answer(r.id, 0.0, None, end, [1]) for r, end in zip(asked, ends, strict=True)])

    monkeypatch.setattr(run, "_pass", serial)
    assert run._t1(None, [0]) == 2.0


def test_a_point_refuses_what_does_not_fit():
    with pytest.raises(ValidationError, match="longest is 1024 in the workload fixed"):
        PeersPoint(longest=1024)
    assert "flover_peers" in experiments.names()
    assert PeersPoint(engine="serial", interval_t1=0.089).label == "serial-fixed-n32-0.089T1-bfloat16"


def test_ours_fused_and_one_after_the_other_give_the_same_tokens(monkeypatch, tmp_path):
    """The real engine, in processes of its own, on a small model."""
    monkeypatch.setitem(models.RANDOM, "random-40m", dict(layers=1, width=64, heads=2, kv_heads=1, ffn=96))
    asked = run._requests(PeersPoint(model="random-40m", requests=3, length_scale=0.02), 0.01)
    folder = models.folder_of("random-40m", "float32", tmp_path)
    passes = [
        processes.serve(ENGINES[name], Job(str(folder), "", "float32", 1, name, asked), [0], tmp_path)
        for name in ("fused", "serial")
    ]
    assert run.equal_share(*passes) == [1, 1, 1]
    assert run.served(asked, passes[0]).peak_bytes > 5e7


def test_the_longest_wait_for_a_next_token_is_told(monkeypatch):
    """Of a server that streams: between tokens, not before the first."""

    class Server:
        now, steps = 0.0, iter([(5.0, [1]), (1.0, [2]), (3.0, []), (0.5, [3])])
        busy = True

        def submit(self, request):
            pass

        def step(self, seconds):
            passed, tokens = next(self.steps)
            self.now += passed
            self.busy = tokens != [3]
            return [Event(0, tokens, tokens == [3])]

    server = Server()
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: server.now)
    (answer,) = protocol.serve(server, [Request(0, 0.0, [1], 3)])
    assert (answer.first_token_s, answer.finish_s, answer.longest_gap_s) == (5.0, 9.5, 3.5)
