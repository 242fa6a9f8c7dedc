"""Processes: what stands in their environment, whose network and whose lock it is, and what is left when they are killed."""

import contextlib
import faulthandler
import fcntl
import gc
import io
import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import time
from importlib import import_module as module
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from attack.promises import command, command_refuses, make_socket, refuses
from typer.testing import CliRunner

from repro.box import boxes, cluster, daemons, network, packages
from repro.cli import app, console
from repro.emulate import netns, owners
from repro.emulate.box import HERE
from repro.experiments.base import Experiment
from repro.experiments.common.ranks import Ranked
from repro.jobs import allocation, runner
from repro.launch import folder as rank_folder
from repro.launch import joined, launch, seats, slurm_env, watchdog
from repro.launch import network as networks
from repro.plan import config
from repro.plan import jobs as plan
from repro.plan.packing import Allocation
from repro.records import provenance
from repro.topology import frontier

pytestmark = pytest.mark.xdist_group("network")
root = pytest.mark.root(pytest.mark.skipif(os.geteuid() != 0, reason="needs root"))
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}
STEP = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
STEP |= {"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_LOCALID": "0"}
NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", joined.ALONE, watchdog.DEADLINE)


def environment(monkeypatch, *given):
    """Nothing of a job but `given`; None takes a variable away."""
    for name in (*NAMES, seats.IN_PACKAGE, *(name for name in os.environ if name.startswith("SLURM_"))):
        monkeypatch.setenv(name, "")  # so that it is put back, also where our code sets it
        monkeypatch.delenv(name)
    for values in given:
        for name, value in values.items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)


def rows(*table):
    """`(what, *values)` as parameters called `what`."""
    return [pytest.param(*values, id=what) for what, *values in table]


# --- the environment: who is this process? -------------------------------------------------------------------------

ODD = ("", "abc", "-1", "1.5", "1e3", "0x1", " 1", "١", "²", "1_0", "9" * 30, "9" * 5000, "nan", "None")


@pytest.mark.parametrize(
    ("given", "place"),
    rows(
        ("nothing", {}, None),
        ("torchrun's only rank", TORCHRUN, (0, 1)),
        ("torchrun's second rank", TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
        ("zeros before a number", TORCHRUN | {"RANK": "01", "WORLD_SIZE": "002"}, (1, 2)),
        ("a rank without a world", {"RANK": "1"}, None),
        ("a rank that is no number, without a world", {"RANK": "abc"}, None),
        ("a world without a rank", {"WORLD_SIZE": "0"}, None),
        ("no address", TORCHRUN | {"MASTER_ADDR": None, "RANK": "7"}, None),
        ("an address alone", {"MASTER_ADDR": "127.0.0.1"}, None),
        ("a task of a step", STEP | {"SLURM_PROCID": "1"}, (1, 2)),
        ("a step of one task", STEP | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (
            "a step of one task that says it is the rank",
            STEP | {"SLURM_STEP_NUM_TASKS": "1", joined.ALONE: "1"},
            (0, 1),
        ),
        ("a batch script", {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
        ("a batch script with odd words", {"SLURM_PROCID": "x", "SLURM_NTASKS": "0", "SLURM_LOCALID": "-"}, None),
        ("tasks without a number of this one", {"SLURM_STEP_NUM_TASKS": "abc"}, None),
        ("a node list that is none", {"SLURM_JOB_NODELIST": "node[1-", "SLURM_NTASKS": "0"}, None),
        ("torchrun inside a step", STEP | TORCHRUN, (0, 1)),
        ("torchrun inside an odd step", {"SLURM_PROCID": "x", "SLURM_STEP_NUM_TASKS": "y"} | TORCHRUN, (0, 1)),
    ),
)
def test_who_this_process_is(monkeypatch, given, place):
    environment(monkeypatch, given)
    assert joined.place_in_job() == place


@pytest.mark.parametrize(
    ("given", "name", "found", "allowed"),
    [
        *(
            pytest.param(TORCHRUN | {name: value}, name, value, None, id=f"{name} is {value[:10]!r}")
            for name in ("RANK", "WORLD_SIZE")
            for value in ODD
        ),
        *(
            pytest.param(STEP | {name: value}, name, value, None, id=f"{name} is {value[:10]!r}")
            for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
            for value in ODD
        ),
        *rows(
            ("a world of none", TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE", "0", "1 or more"),
            ("a rank beyond its world", TORCHRUN | {"RANK": "1"}, "RANK", "1", "allowed: 0"),
            ("a rank far beyond", TORCHRUN | {"RANK": "9", "WORLD_SIZE": "8"}, "RANK", "9", "allowed: 0 to 7"),
            ("a task beyond its step", STEP | {"SLURM_PROCID": "2"}, "SLURM_PROCID", "2", "allowed: 0 to 1"),
            ("a step of no task", STEP | {"SLURM_STEP_NUM_TASKS": "0"}, "SLURM_STEP_NUM_TASKS", "0", "1 or more"),
        ),
    ],
)
def test_a_place_that_is_none_is_named(monkeypatch, given, name, found, allowed):
    """By whoever asks first: the launcher, the network, a point, an allocation."""
    environment(monkeypatch, given)
    words = [f"the environment variable {name} is {found!r}, allowed: ", allowed or ""]
    refuses(joined.place_in_job, ValueError, *words)
    refuses(lambda: launch(divmod, 1), ValueError, *words)
    refuses(networks.between(frontier(1)).__enter__, ValueError, *words)
    refuses(lambda: runner.run("flover_queue", Ranked()), ValueError, *words)


@pytest.mark.parametrize(
    ("given", "words"),
    rows(
        *(
            (f"port {value[:10]!r}", TORCHRUN | {"MASTER_PORT": value}, ["MASTER_PORT", repr(value), "1 to 65535"])
            for value in (*ODD, "0", "65536", "70000")
        ),
        *(
            (f"local rank {value[:10]!r}", TORCHRUN | {"LOCAL_RANK": value}, ["LOCAL_RANK", repr(value), "0 or more"])
            for value in ODD
        ),
        ("no port", TORCHRUN | {"MASTER_PORT": None}, ["MASTER_PORT is not set"]),
        ("an empty address", TORCHRUN | {"MASTER_ADDR": ""}, ["MASTER_ADDR is not set"]),
        ("a world of another size", TORCHRUN | {"WORLD_SIZE": "3"}, ["world_size is 1", "started 3 ranks"]),
        ("a deadline that is no time", TORCHRUN | {watchdog.DEADLINE: "noon"}, [watchdog.DEADLINE, "noon"]),
        ("Slurm's local number, odd", TORCHRUN | {"LOCAL_RANK": None, "SLURM_LOCALID": "x"}, ["LOCAL_RANK", "'x'"]),
    ),
)
def test_what_a_rank_cannot_join_with_is_named(monkeypatch, given, words):
    environment(monkeypatch, given)
    refuses(lambda: launch(divmod, 1), ValueError, *words)


def test_without_a_local_rank_no_two_ranks_take_one_gpu(monkeypatch):
    import torch

    environment(monkeypatch, TORCHRUN | {"WORLD_SIZE": "2", "LOCAL_RANK": None})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refuses(lambda: launch(divmod, 2), ValueError, "LOCAL_RANK is not set")


SCONTROL = {
    "answers": "echo node1; echo node2",
    "refuses": "echo Invalid hostlist: $3 >&2; exit 1",
    "says nothing": "true",
    "names others": "echo login; echo node2",
}


def scontrol(folder, monkeypatch, how):
    """A command that is asked for the nodes of a list; None: it is not there."""
    monkeypatch.setenv("PATH", str(folder))
    if how is not None:
        file = folder / "scontrol"
        file.write_text(f"#!/bin/sh\n{SCONTROL[how]}\n")
        file.chmod(0o755)


@pytest.mark.parametrize(
    ("how", "given", "words"),
    rows(
        ("no scontrol", None, {}, ["node[1-2]", "`scontrol` is not on PATH"]),
        ("a broken list", "refuses", {"SLURM_STEP_NODELIST": "node[1-"}, ["'node[1-'", "Invalid hostlist: node[1-"]),
        ("an empty list", "says nothing", {"SLURM_STEP_NODELIST": ""}, ["SLURM_STEP_NODELIST is ''", "nothing"]),
        ("no list", "answers", {"SLURM_STEP_NODELIST": None}, ["no step of a Slurm job"]),
        *((f"job {value[:10]!r}", "answers", {"SLURM_JOB_ID": value}, ["SLURM_JOB_ID", repr(value)]) for value in ODD),
        *(
            (f"step {value[:10]!r}", "answers", {"SLURM_STEP_ID": value}, ["SLURM_STEP_ID", repr(value)])
            for value in ODD
        ),
        ("no job", "answers", {"SLURM_JOB_ID": None}, ["MASTER_PORT is not set"]),
    ),
)
def test_a_meeting_place_that_slurm_cannot_tell(monkeypatch, tmp_path, how, given, words):
    environment(monkeypatch, STEP, given)
    scontrol(tmp_path, monkeypatch, how)
    refuses(slurm_env.rendezvous, ValueError, *words)


@pytest.mark.parametrize("how", [None, *SCONTROL])
def test_where_variables_of_a_job_linger_a_record_still_names_its_host(monkeypatch, tmp_path, how):
    """It was once lost after the work, where `scontrol` did not answer."""
    environment(monkeypatch, STEP)
    scontrol(tmp_path, monkeypatch, how)
    found = provenance.collect("repro.experiments.flover_queue", provenance.now()).hosts
    told = {"answers": ["node1", "node2"], "names others": ["login", "node2"]}
    assert found == told.get(how, [socket.gethostname()])


@pytest.mark.parametrize(
    ("how", "here", "words"),
    rows(
        ("nodes of another cluster", "names others", None, ["SLURM_CLUSTER_NAME", "login"]),
        ("outside a node", "answers", None, [str(HERE)]),
        ("more GCDs than a node has", "answers", {"like": "frontier", "prefix": "x"}, ["do not fit"]),
    ),
)
def test_a_cluster_that_is_not_the_box(monkeypatch, tmp_path, how, here, words):
    environment(monkeypatch, STEP, {"SLURM_CLUSTER_NAME": networks.BOX})
    scontrol(tmp_path, monkeypatch, how)
    if here is not None:
        (tmp_path / "box.json").write_text(json.dumps(here))
        monkeypatch.setattr("repro.emulate.box.HERE", tmp_path / "box.json")
    refuses(networks.between(frontier(2, gcds=4)).__enter__, (ValueError, OSError), *words)


@pytest.mark.parametrize("value", [*ODD, "0"])
def test_gcds_of_a_package(monkeypatch, value):
    import torch.distributed

    environment(monkeypatch, {seats.IN_PACKAGE: value})
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda found, own: found.__setitem__(0, own))
    refuses(lambda: seats.check_placement(frontier(1, 1, 1)), ValueError, seats.IN_PACKAGE, repr(value), "1 or more")


@pytest.mark.parametrize(
    ("shown", "device"),
    rows(
        ("numbers", "4,5", 5),
        ("one", "3", 3),
        ("none", "", None),
        ("names", "GPU-1f2e,MIG-3", None),
        ("a mixture", "x,2,", 2),
        ("less than none", "-1", None),
        ("a raised digit", "²", None),
    ),
)
def test_devices_that_a_rank_is_shown(monkeypatch, shown, device):
    for name in seats._DEVICES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert seats.seat().device == device


# --- the environment of commands -----------------------------------------------------------------------------------

QUEUE = ["run", "flover_queue", "--set", "requests=2", "--set", "seeds=2"]


def invoked(*arguments):
    """`repro ARGUMENTS` in this process."""
    ended = CliRunner().invoke(app, list(map(str, arguments)))
    assert ended.exception is None or isinstance(ended.exception, SystemExit), repr(ended.exception)
    return ended


@pytest.mark.parametrize(
    ("given", "words"),
    rows(
        ("a stale rank", TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2"}, ["rank 1 of 2", "needs 1", "RANK", "unset"]),
        ("the first of several", TORCHRUN | {"WORLD_SIZE": "2"}, ["rank 0 of 2", "needs 1"]),
        ("a task of a step", STEP | {"SLURM_PROCID": "1"}, ["rank 1 of 2", "SLURM_STEP_NUM_TASKS"]),
        ("a rank that is no number", TORCHRUN | {"RANK": "abc"}, ["RANK is 'abc'"]),
        ("a world that is none", TORCHRUN | {"WORLD_SIZE": "-1"}, ["WORLD_SIZE is '-1'"]),
    ),
)
def test_a_point_of_one_process_is_no_rank_of_several(monkeypatch, tmp_path, given, words):
    """It said ok, and had written nothing. What stands where the record would go stays."""
    environment(monkeypatch, given)
    out = tmp_path / "x.json"
    out.write_text("mine")
    ended = invoked(*QUEUE, "--out", out)
    assert ended.exit_code == 2 and all(word in " ".join(ended.output.split()) for word in words), ended.output
    assert out.read_text() == "mine"


@pytest.mark.parametrize(
    "given",
    rows(
        ("nothing", {}),
        ("the only rank of torchrun", TORCHRUN),
        ("the only task of a step", STEP | {"SLURM_STEP_NUM_TASKS": "1", joined.ALONE: "1"}),
        ("half of torchrun's words", {"RANK": "1", "WORLD_SIZE": "2"}),
        ("odd words of a job's script", {"SLURM_PROCID": "x", "SLURM_NTASKS": "0", "SLURM_JOB_NODELIST": "node[1-"}),
        ("a step of a cluster that is not here", STEP | {"SLURM_STEP_NUM_TASKS": "1"}),
    ),
)
def test_a_point_runs_with_what_does_no_harm(monkeypatch, tmp_path, given):
    environment(monkeypatch, given)
    out = tmp_path / "x.json"
    ended = invoked(*QUEUE, "--out", out)
    assert ended.exit_code == 0, ended.output
    assert json.loads(out.read_text())["status"] == "ok"


@pytest.mark.parametrize(
    ("given", "words"),
    rows(
        ("a stale rank", TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2"}, ["rank 1 of 2", "to be no rank"]),
        ("the only rank", TORCHRUN, ["rank 0 of 1", "to be no rank"]),
        ("no number", TORCHRUN | {"RANK": "abc"}, ["RANK is 'abc'"]),
    ),
)
def test_an_allocation_of_this_machine_is_no_rank(project, monkeypatch, given, words):
    """It starts the points itself, each of which would think the same of its place."""
    environment(monkeypatch, given)
    refuses(lambda: allocation.run(*planned([1, 2])), ValueError, *words)
    assert not list(Path("results").rglob("records/*/*.json"))


def test_ranks_of_another_number_than_the_point_write_nothing(monkeypatch, tmp_path):
    environment(monkeypatch, TORCHRUN | {"WORLD_SIZE": "2"})
    refuses(lambda: runner.run("zero_train", Ranked(), out=tmp_path / "x.json"), ValueError, "rank 0 of 2", "needs 8")
    assert not list(tmp_path.iterdir())


ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "LANG": None}


def whole(given):
    """An environment for a process, without what is None."""
    return {name: value for name, value in (os.environ | given).items() if value is not None}


def real(arguments, cwd, given):
    with pytest.MonkeyPatch.context() as patch:
        environment(patch, given)
        return command(arguments, cwd)


@pytest.mark.parametrize(
    ("given", "words"),
    rows(
        ("a stale rank", TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2"}, ["rank 1 of 2"]),
        ("an ASCII locale", ASCII, ["set PYTHONUTF8=1", "LC_ALL is 'C'"]),
        ("a link as the lock", {"TMPDIR": "."}, ["repro-measure.lock", "TMPDIR"]),
    ),
)
def test_a_real_command_names_what_is_wrong(monkeypatch, tmp_path, given, words):
    (tmp_path / "repro-measure.lock").symlink_to("victim")
    environment(monkeypatch, given)
    command_refuses([*QUEUE, "--out", "x.json"], tmp_path, *words)
    assert not (tmp_path / "x.json").exists() and not (tmp_path / "victim").exists()


@pytest.mark.parametrize(
    "given",
    rows(
        ("no home, no TMPDIR, output in ASCII", {"HOME": None, "TMPDIR": "/none", "PYTHONIOENCODING": "ascii"}),
        ("a home that is no folder, the C locale", {"HOME": "/dev/null", "LC_ALL": "C", "LANG": None}),
    ),
)
def test_a_real_command_runs_in_a_bare_environment(tmp_path, given):
    ended = real([*QUEUE, "--out", "×.json"], tmp_path, given)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "×.json").exists()


@pytest.mark.parametrize(
    "arguments", [["claims", "ZT", "--details"], ["plan", "--points"], ["claims", "--help"], ["×"]]
)
def test_output_where_not_every_character_can_be_shown(monkeypatch, arguments):
    """What cannot be shown is shown as its number."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), "ascii"))
    console.adapt_streams()
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    assert ended.value.code in ((2,) if arguments == ["×"] else (0, 3))
    said = b""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        said += stream.buffer.getvalue()
    assert said and (arguments != ["×"] or b"\\xd7" in said)


# --- the lock of the machine ---------------------------------------------------------------------------------------


def _fifo(path):
    os.mkfifo(path)


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setattr(runner.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "victim").write_text("precious")
    return tmp_path / "repro-measure.lock"


@pytest.mark.parametrize(
    "plant",
    rows(
        ("a link to a file", lambda path: path.symlink_to("victim")),
        ("a link to nothing", lambda path: path.symlink_to("new")),
        ("a link to a folder", lambda path: path.symlink_to(".")),
        ("a link to itself", lambda path: path.symlink_to(path.name)),
        ("a link to a device", lambda path: path.symlink_to("/dev/zero")),
        ("a FIFO", _fifo),
        ("a socket", make_socket),
        ("a folder", lambda path: path.mkdir()),
    ),
)
def test_what_is_planted_as_the_lock_is_refused(lock, plant):
    plant(lock)
    before = sorted(lock.parent.iterdir())
    for timed in (True, False):
        refuses(runner.machine(timed).__enter__, OSError, lock, "TMPDIR", "Remove it")
    assert (lock.parent / "victim").read_text() == "precious" and sorted(lock.parent.iterdir()) == before


@pytest.mark.parametrize(
    "contents",
    rows(("an empty file", b""), ("a file with words", b"words"), ("a link besides", None)),
)
def test_the_lock_is_never_written(lock, contents):
    if contents is None:
        os.link(lock.parent / "victim", lock)
    else:
        lock.write_bytes(contents)
    before = lock.read_bytes()
    with runner.machine(True):
        assert lock.read_bytes() == before
    assert lock.read_bytes() == before


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_others_may_read_the_lock_and_not_write_it(lock, umask):
    """For whatever umask its first user has: reading is what it takes to lock it."""
    before = os.umask(umask)
    try:
        with runner.machine(True):
            assert stat.S_IMODE(lock.stat().st_mode) == 0o644
    finally:
        os.umask(before)


def in_child(act, user=None):
    """Exit code of a fork that does `act`, as another user if asked."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            code = act() or 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


NOBODY = 65534


@pytest.mark.parametrize("user", [None, pytest.param(NOBODY, marks=root)], ids=["one user", "two users"])
@pytest.mark.parametrize("mine", [True, False], ids=["timed", "not timed"])
@pytest.mark.parametrize("theirs", [True, False], ids=["beside a timed one", "beside one that is not"])
def test_runs_of_all_users_are_beside_each_other_only_where_none_is_timed(lock, user, mine, theirs):
    lock.parent.chmod(0o1777)

    def attempt():
        handle = runner._open_lock(lock)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, (fcntl.LOCK_EX if theirs else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            return 0
        return 1

    for folder in lock.parents:
        if user is not None and folder.stat().st_mode & 0o1 == 0:
            folder.chmod(folder.stat().st_mode | 0o1)  # pytest's folders are their user's
    with runner.machine(mine):
        assert in_child(attempt, user) == int(mine or theirs)
    assert in_child(attempt, user) == 0


def test_no_folder_for_temporary_files_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    ended = invoked(*QUEUE, "--out", tmp_path / "x.json")
    assert ended.exit_code == 2 and "temporary directory" in ended.output and not (tmp_path / "x.json").exists()


# --- the folders of ranks ------------------------------------------------------------------------------------------


def _locked_elsewhere(path):
    """By a process that lives as long as this one."""
    path.mkdir()
    handle = os.open(path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)


@pytest.mark.parametrize(
    ("name", "plant", "age_s", "kept"),
    rows(
        ("of a killed launch", "repro-launch-x", lambda path: path.mkdir(), 100, False),
        ("of one that is just beginning", "repro-launch-x", lambda path: path.mkdir(), 1, True),
        ("of one that lives", "repro-launch-x", _locked_elsewhere, 100, True),
        ("a file", "repro-launch-x", lambda path: path.touch(), 100, True),
        ("a link", "repro-launch-x", lambda path: (path.with_name("v").mkdir(), path.symlink_to("v")), 100, True),
        ("of older releases", "repro-ranks-x", lambda path: path.mkdir(), 100, True),
        ("of others", "mine", lambda path: path.mkdir(), 100, True),
    ),
)
def test_folders_of_killed_launches_are_cleared_by_the_next(tmp_path, monkeypatch, name, plant, age_s, kept):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = tmp_path / name
    plant(path)
    then = time.time() - age_s
    os.utime(path, (then, then), follow_symlinks=False)
    before = set(tmp_path.iterdir())
    with rank_folder.private() as own:
        assert own in set(tmp_path.iterdir()) and stat.S_IMODE(own.stat().st_mode) == 0o700
        assert os.path.lexists(path) == kept
    assert set(tmp_path.iterdir()) == (before if kept else before - {path})


# --- whose a network is --------------------------------------------------------------------------------------------


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setattr(owners, "RECORDS", tmp_path / "records")
    yield owners.RECORDS
    for name in list(owners._held):
        owners.release(name)


def abandoned():
    return [left for left in owners.abandoned()]


def die_with(*names, before=lambda: None):
    """A process that owns `names` and is killed."""

    def act():
        owners.claim(f"{os.getpid()}-x", names)
        before()
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(act) == -signal.SIGKILL


def test_a_living_owner_keeps_its_network(records):
    owners.claim("1-a", ["one", "two"])
    assert abandoned() == [] and (records / "1-a").exists()
    owners.release("1-a")
    assert not list(records.iterdir())


def test_two_owners_of_which_one_is_dead(records):
    owners.claim("1-a", ["mine"])
    die_with("one", "two")
    assert abandoned() == [["one", "two"]] and abandoned() == []
    assert [path.name for path in records.iterdir()] == ["1-a"]


def test_a_rank_that_outlives_its_owner_keeps_the_network(records):
    """Until it has ended, too: it is inside."""
    reader, writer = os.pipe()

    def rank():
        if os.fork() == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)

    die_with("one", before=rank)
    assert abandoned() == []
    os.close(writer)
    os.close(reader)
    deadline = time.monotonic() + 5
    while not (found := abandoned()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found == [["one"]]


def test_a_network_that_could_not_be_removed_stays_on_record(records):
    die_with("one")
    with pytest.raises(netns.FabricError):
        for _ in owners.abandoned():
            raise netns.FabricError("busy")
    assert abandoned() == [["one"]]


def test_a_name_is_claimed_once(records):
    owners.claim("1-a", ["one"])
    refuses(lambda: owners.claim("1-a", ["two"]), FileExistsError, "1-a")
    assert (records / "1-a").read_text() == "one"


@pytest.mark.parametrize(
    "plant",
    rows(
        ("a link to a folder", lambda path: path.symlink_to("elsewhere")),
        ("a link to nothing", lambda path: path.symlink_to("nothing")),
        ("a file", lambda path: path.write_text("x")),
        ("a folder where others write", lambda path: (path.mkdir(), path.chmod(0o777))),
        ("a folder where a group writes", lambda path: (path.mkdir(), path.chmod(0o770))),
        ("a folder that others read", lambda path: (path.mkdir(), path.chmod(0o755))),
        ("a folder of another user", root_folder := lambda path: (path.mkdir(0o700), os.chown(path, NOBODY, NOBODY))),
    ),
)
def test_records_are_kept_in_a_folder_of_ones_own_alone(records, monkeypatch, plant):
    """Whoever can write there says what is removed. No fabric is built then, and the reason is told."""
    (records.parent / "elsewhere").mkdir(mode=0o700)
    (records.parent / "elsewhere/1-x").write_text("victim")
    if os.geteuid() and "chown" in plant.__code__.co_names:
        pytest.skip("needs root")
    plant(records)
    monkeypatch.setattr(netns, "_lacking", lambda: None)
    monkeypatch.setattr(netns, "command", lambda *_: pytest.fail("a command was run"))
    refuses(netns.Fabric(frontier(1)).__enter__, netns.FabricError, records)
    assert (records.parent / "elsewhere/1-x").exists()


@pytest.mark.parametrize("fails", ["netns add", "link add spine", "class add", "eth0", "class replace"])
def test_only_what_the_record_names_is_removed(records, monkeypatch, fails):
    """A build that fails at any of its commands; namespaces of others have names that begin like ours."""
    made, said = {"repro-2024-01-01-mine", "repro-1-1-0-fab", "repro-box-gcd-0"}, []
    foreign = set(made)

    def play(words, lines=None):
        for line in lines or [" ".join(words[1:])]:
            if fails in line:
                raise netns.FabricError(line)
            _verb, _, name = line.partition("netns add ")
            made.update({name} if name else set())
        if words[:3] == ["ip", "netns", "del"]:
            said.append(words[3])
            made.remove(words[3])
        return ""

    monkeypatch.setattr(netns, "_lacking", lambda: None)
    monkeypatch.setattr(netns, "command", play)
    monkeypatch.setattr(netns, "present", lambda name: name in made)
    refuses(netns.Fabric(frontier(1)).__enter__, netns.FabricError, fails)
    assert made == foreign and not list(records.iterdir())
    assert all(name.startswith(f"repro-{os.getpid()}-") for name in said)


# --- whose a box is ------------------------------------------------------------------------------------------------


@pytest.fixture
def box_folder(tmp_path, monkeypatch):
    """A folder of boxes of its own; nothing is in the way of any number."""
    monkeypatch.setattr(boxes, "FOLDER", tmp_path / "boxes")
    monkeypatch.setattr(boxes, "_MOUNT_POINT", tmp_path / "etc-slurm")
    monkeypatch.setattr(boxes.psutil, "net_if_addrs", dict)
    monkeypatch.setattr(boxes.OwnedBox, "controller_port", 0)  # any that is free
    monkeypatch.setattr(boxes.OwnedBox, "accounting_port", 0)
    return boxes.FOLDER


def of(monkeypatch, user, checkout):
    monkeypatch.setenv("SUDO_USER", user)
    (checkout / "config").mkdir(parents=True, exist_ok=True)
    (checkout / "config/claims.yaml").touch()
    monkeypatch.setenv("REPRO_ROOT", str(checkout))


def test_two_users_and_two_checkouts_have_a_box_each(box_folder, monkeypatch, tmp_path):
    made = {}
    for whose in [("a", tmp_path / "one"), ("b", tmp_path / "one"), ("a", tmp_path / "two"), ("b", tmp_path / "two")]:
        of(monkeypatch, *whose)
        assert boxes.mine() is None
        made[whose] = boxes.take(2, 8)
        refuses(
            lambda: boxes.take(2, 8), packages.BoxError, "there already", made[whose].folder, *whose, "repro box down"
        )
    assert [box.number for box in made.values()] == [0, 1, 2, 3] and len({box.id for box in made.values()}) == 4
    for whose, box in made.items():
        of(monkeypatch, *whose)
        assert boxes.mine() == box
    boxes.drop(made[("b", tmp_path / "one")])
    of(monkeypatch, "c", tmp_path / "one")
    assert boxes.take(1, 4).number == 1, "the first that is free"


@pytest.mark.parametrize(
    ("obstacle", "number"),
    rows(
        ("nothing", lambda patch, folder: None, 0),
        ("an address of another interface", lambda patch, folder: patch.setattr(
            boxes.psutil, "net_if_addrs", lambda: {"eth7": [SimpleNamespace(address="10.77.0.9")]}), 1),
        ("addresses that only look alike", lambda patch, folder: patch.setattr(
            boxes.psutil, "net_if_addrs", lambda: {"eth7": [SimpleNamespace(address="10.77.10.9")]}), 0),
        ("a folder without an owner", lambda patch, folder: (folder / "0/etc").mkdir(parents=True), 1),
        ("a file at its place", lambda patch, folder: (folder.mkdir(), (folder / "0").touch()), 1),
        ("files of others in the folder", lambda patch, folder: (folder.mkdir(), (folder / "notes").touch()), 0),
        ("what a killed claim has left", lambda patch, folder: (
            (folder / ".begun").mkdir(parents=True), (folder / ".begun/owner.json").write_text("{")), 0),
    ),
)  # fmt: skip
def test_a_box_takes_a_number_that_is_free(box_folder, monkeypatch, tmp_path, obstacle, number):
    of(monkeypatch, "a", tmp_path / "one")
    obstacle(monkeypatch, box_folder)
    box = boxes.take(1, 8)
    assert box.number == number and boxes.known() == [box]


def test_a_port_that_somebody_has(box_folder, monkeypatch, tmp_path):
    of(monkeypatch, "a", tmp_path / "one")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        monkeypatch.setattr(boxes.OwnedBox, "accounting_port", property(lambda box: 0 if box.number else taken))
        assert boxes.take(1, 8).number == 1


def test_without_a_number_left_the_owners_are_named(box_folder, monkeypatch, tmp_path):
    monkeypatch.setattr(boxes, "MOST", 2)
    for user in "ab":
        of(monkeypatch, user, tmp_path / "one")
        boxes.take(1, 8)
    of(monkeypatch, "c", tmp_path / "one")
    refuses(lambda: boxes.take(1, 8), packages.BoxError, "no number", "user a", "user b", tmp_path / "one")


@pytest.mark.parametrize(
    ("pid", "began", "user", "complete", "abandoned"),
    rows(
        ("its start goes on", None, None, "a", False, False),
        ("its starter is dead", 2**22, None, "a", False, True),
        ("another process has the pid", None, "1", "a", False, True),
        ("it is complete, and lives without its starter", 2**22, None, "a", True, False),
        ("another user's", 2**22, None, "b", False, False),
    ),
)
def test_a_start_that_was_killed_is_known(box_folder, monkeypatch, tmp_path, pid, began, user, complete, abandoned):
    of(monkeypatch, "a", tmp_path / "one")
    box = boxes.take(1, 8)
    if complete:
        box.complete()
    kept = json.loads((box.folder / "owner.json").read_text())
    kept |= {"pid": pid or kept["pid"], "began": began or kept["began"], "user": user}
    (box.folder / "owner.json").write_text(json.dumps(kept))
    assert [found.abandoned() for found in boxes.known()] == [abandoned]


@pytest.mark.parametrize(
    ("there", "put", "kept"),
    rows(
        ("none", False, False, False),
        ("one of the machine's own", True, False, True),
        ("one that somebody has put a file into", False, True, True),
    ),
)
def test_the_mount_point_goes_with_the_last_box(box_folder, monkeypatch, tmp_path, there, put, kept):
    mount = tmp_path / "etc-slurm"
    if there:
        mount.mkdir()
    made = []
    for user in "ab":
        of(monkeypatch, user, tmp_path / "one")
        made.append(boxes.take(1, 8))
    if put:
        (mount / "slurm.conf").touch()
    boxes.drop(made[0])
    assert mount.exists(), "the other box mounts there"
    boxes.drop(made[1])
    assert mount.exists() == kept and [path.name for path in box_folder.iterdir()] == []


def test_down_of_a_box_that_is_none(box_folder, monkeypatch, tmp_path):
    of(monkeypatch, "a", tmp_path / "one")
    other = boxes.take(1, 8)
    of(monkeypatch, "b", tmp_path / "one")
    assert not cluster.down()
    refuses(lambda: cluster.down(box_folder / "9"), packages.BoxError, box_folder / "9", other.folder, "user a")
    refuses(cluster.configuration, packages.BoxError, "repro box up", other.folder)
    assert boxes.known() == [other] and cluster.status().others == [str(other)]


def test_down_names_nothing_that_is_not_its_own(box_folder, monkeypatch, tmp_path):
    """All that it removes or ends carries its id."""
    of(monkeypatch, "a", tmp_path / "one")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    box, said = boxes.take(2, 8), []
    monkeypatch.setattr(network, "command", lambda words: said.append(words[-1]))
    monkeypatch.setattr(netns, "command", lambda words: said.append(words[-1]))
    monkeypatch.setattr(network, "_there", lambda device: device not in said)
    monkeypatch.setattr(netns, "present", lambda name: name not in said)
    assert cluster.down()
    assert len(said) == len(set(said)) == 3 + 2 + 1 + 16
    assert all(box.id in name for name in said) and not boxes.known()


@pytest.mark.parametrize(
    ("given", "ours"),
    rows(
        ("its daemon", lambda box: {daemons._MARK: box.id}, True),
        ("a daemon of another box", lambda box: {daemons._MARK: "0" * 6}, False),
        ("what was started from a shell that asks it", lambda box: {"SLURM_CONF": str(box.configuration)}, False),
        ("anything", lambda box: {}, False),
    ),
)
def test_what_belongs_to_a_box(box_folder, monkeypatch, tmp_path, given, ours):
    """Whatever it is called, and whatever files it names."""
    of(monkeypatch, "a", tmp_path / "one")
    box = boxes.take(1, 8)
    munged = tmp_path / "munged"
    munged.symlink_to("/bin/sleep")
    started = subprocess.Popen([munged, "60"], env=os.environ | given(box))
    try:
        assert (started.pid in [found.pid for found in daemons.running(box)]) == ours
        daemons.stop(box)
        assert (started.poll() is not None) == ours
    finally:
        started.kill()
        started.wait()


@root
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_of_a_box_whatever_the_umask(box_folder, monkeypatch, tmp_path, umask):
    """Nobody else writes what root's daemons read, nor reads keys and the database; everybody may ask the cluster."""
    (checkout := tmp_path / "one").mkdir()
    (checkout / "slurm").symlink_to(Path(os.environ.get("REPRO_ROOT") or Path.cwd()) / "slurm")
    of(monkeypatch, "a", checkout)
    before, asked = os.umask(umask), []
    monkeypatch.setattr(daemons, "_start", lambda box, words, **more: asked.append((words, more)))
    monkeypatch.setattr(daemons, "_await", lambda *_: None)
    monkeypatch.setattr(daemons, "_said", lambda *_: "")
    monkeypatch.setattr(daemons.subprocess, "Popen", lambda words, **more: asked.append((words, more)))
    try:
        box = boxes.take(2, 8)
        cluster._write(box, cluster.Settings(nodes=2, accounting=True))
        daemons.munged(box)
        daemons.accounting(box)
    finally:
        os.umask(before)
    modes = {str(path.relative_to(box.folder)): stat.S_IMODE(path.stat().st_mode) for path in box.folder.rglob("*")}
    assert {name for name, mode in modes.items() if mode & 0o022} == {f"dev/gpu{number}" for number in range(8)}
    private = {"db", "log", "state", "etc/munge.key", "etc/slurmdbd.conf"}
    assert {name for name, mode in modes.items() if not mode & 0o077} == private
    assert [stat.S_IMODE(path.stat().st_mode) for path in (box_folder, box.folder)] == [0o755, 0o755]
    (database,) = (words for words, _ in asked if words[0] == "mariadbd")
    assert "--skip-networking" in database and "--skip-grant-tables" not in database
    (place,) = (word.partition("=")[2] for word in database if word.startswith("--socket="))
    assert Path(place).parent == box.folder / "db"
    assert any("--auth-root-authentication-method=socket" in words for words, _ in asked)


# --- kills ---------------------------------------------------------------------------------------------------------

KILLS = int(os.environ.get("REPRO_KILLS", 1))  # of each kind; `make test` tries only some kinds
LENGTH = 0.8  # seconds in which one falls: about what a run takes
RESULTS = "results/kills"
SHAPE = frontier(1, packages=1, gcds=2)


def rendezvous(rank, world_size):
    import torch.distributed as dist

    for _ in range(4):
        dist.barrier()
        time.sleep(0.02)


def stand_in(self, point):
    """A point with all that a point has: a network, ranks in it, numbers. The work is none."""
    with networks.between(SHAPE) as links:
        launch(rendezvous, 2, fabric=links.fabric, timeout_s=20)
    return module("repro.experiments.flover_queue.run").run(point)


def planned(requests):
    """A plan with one allocation of so many points."""
    jobs = plan._jobs("flover_queue", config.Grid(grid={"requests": requests, "seeds": 2}), RESULTS, {}, "test")
    names = [job.record for job in jobs]
    one = Allocation(name="kills", experiment="flover_queue", nodes=1, expected=1, jobs=names)
    _settings, platform = config.load("smoke")
    empty = plan.Plan.model_construct(
        results=RESULTS, jobs=jobs, allocations=[one], made=provenance.now(), tier="smoke", platform="laptop"
    )
    return empty, one, platform


def worker(what):
    """A process with a session of its own that runs the allocation, as `repro allocation` does."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        gc.freeze()  # what earlier tests left, threads of theirs among it, is not this process's to destroy
        faulthandler.disable()  # crashes are wanted here
        faulthandler.register(signal.SIGUSR1, file=open("stacks.txt", "a"))  # noqa: SIM115 (of its children as well)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = len(allocation.run(*what))
    except SystemExit as ended:
        code = ended.code
    finally:
        os._exit(code)


def ended(pid, seconds=150):
    """Exit code of a worker, negative for a signal. One that hangs fails the test, which tells where its processes are."""
    deadline = time.monotonic() + seconds
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            for tell in (signal.SIGUSR1, signal.SIGKILL):
                for each in family:
                    with contextlib.suppress(psutil.Error):
                        each.send_signal(tell)
                time.sleep(1)
            os.waitpid(pid, 0)
            pytest.fail(f"hangs: {family}\n{Path('stacks.txt').read_text()}")
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(found[1])


def below(pid, depth):
    """Processes so many generations below: points are 1, their ranks 2. They have threads, unlike `ip` and `git`."""
    found = [psutil.Process(pid)]
    for _ in range(depth):
        found = [child for parent in found for child in parent.children() if child.num_threads() > 1]
    return found


def out_of_memory(process):
    process.rlimit(psutil.RLIMIT_AS, (1 << 20, 1 << 20))


def sent(number):
    return lambda process: process.send_signal(number)


def to_all(number):
    return lambda process: os.killpg(process.pid, number)


# What is done, to the generation of processes, and what may become of a point.
KINDS = {
    "a rank is killed": (sent(signal.SIGKILL), 2, {"node_failure"}),
    "a rank crashes": (sent(signal.SIGSEGV), 2, {"node_failure"}),
    "a rank is asked to end": (sent(signal.SIGTERM), 2, {"node_failure"}),
    "a point is killed": (sent(signal.SIGKILL), 1, {"node_failure"}),
    "a point crashes": (sent(signal.SIGSEGV), 1, {"unexpected"}),
    "a point's time is over": (sent(signal.SIGALRM), 1, {"timeout", "unexpected"}),  # before it has begun: no handler
    "a point has no memory": (out_of_memory, 1, {"oom", "unexpected", "node_failure"}),
    "the allocation is killed": (sent(signal.SIGKILL), 0, set()),
    "the allocation is asked to end": (sent(signal.SIGTERM), 0, set()),
    "Ctrl-C": (to_all(signal.SIGINT), 0, set()),
    "all are killed": (to_all(signal.SIGKILL), 0, set()),
}
FEW = ("a rank is killed", "the allocation is killed", "all are killed")


@pytest.fixture
def workplace(project, monkeypatch):
    """A project whose points are stand-ins, and what is foreign in it: files, a process and a namespace."""
    import torch.distributed  # noqa: F401 (once, not in every fork)

    environment(monkeypatch)
    monkeypatch.setattr("tempfile.tempdir", str(project / "tmp"))
    monkeypatch.setattr(owners, "RECORDS", project / "records-of-networks")
    monkeypatch.setattr(Experiment, "run", stand_in)
    netns.unavailable.cache_clear()
    namespace = f"repro-mine-{os.getpid()}" if netns.unavailable() is None else None
    files = [project / RESULTS / "records/flover_queue/notes.txt", project / "tmp/mine", project / "mine.json"]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    sleeper = subprocess.Popen(["sleep", "3600"])
    if namespace:
        netns.command(["ip", "netns", "add", namespace])
    try:
        yield project
        assert all(file.read_text() == "mine" for file in files)
        assert sleeper.poll() is None
        assert namespace is None or netns.present(namespace)
    finally:
        sleeper.kill()
        sleeper.wait()
        if namespace:
            netns.command(["ip", "netns", "del", namespace])
        netns.unavailable.cache_clear()


def finished():
    """The contents of all records that say ok. None is torn."""
    found = {path: path.read_bytes() for path in Path(RESULTS).rglob("records/*/*.json")}
    assert all(json.loads(text)["status"] in ("ok", "failed") for text in found.values())
    return {path: text for path, text in found.items() if json.loads(text)["status"] == "ok"}


def killed_once(how, generation, after_s):
    """Do `how` to a process of that generation at the first moment after `after_s` when there is one. What was finished
    before; what failed, by cause; whether there was one."""
    pid = worker(planned([1, 2, 3]))
    driver, victim = psutil.Process(pid), None
    time.sleep(after_s)
    while victim is None and driver.status() != psutil.STATUS_ZOMBIE:
        with contextlib.suppress(psutil.Error, IndexError):
            victim = random.choice(below(pid, generation))
    before, family = finished(), [driver, *driver.children(recursive=True)]
    with contextlib.suppress(psutil.Error, ProcessLookupError):  # it has just ended, or all of it has
        how(victim) if victim else None
    ended(pid)
    _gone, alive = psutil.wait_procs(family[1:], timeout=20)
    assert not alive, alive
    after = finished()
    assert {path: after[path] for path in before} == before
    records = [json.loads(path.read_text()) for path in Path(RESULTS).rglob("records/*/*.json")]
    failed = {found["cause"]: found["detail"] for found in records if found["status"] == "failed"}
    return before, failed, victim is not None


def completed(before):
    """Another run makes what is missing and leaves what is there; nothing of the first is left then."""
    networks_left = [name for record in owners.RECORDS.glob("*") for name in record.read_text().split()]
    assert ended(worker(planned([1, 2, 3]))) == 0
    after = finished()
    assert len(after) == 3 and {path: after[path] for path in before} == before
    if netns.unavailable() is None:
        with netns.Fabric(SHAPE):  # clears what is left, if no point had to be made
            pass
        assert not any(map(netns.present, networks_left)) and not list(owners.RECORDS.iterdir())


def try_kind(kind, kills):
    """`kills` runs, each hit at a random moment."""
    how, generation, causes = KINDS[kind]
    hits, tries = 0, 0
    while tries < kills or (not hits and tries < 10):  # now and then a run has ended before its moment comes
        for path in finished():
            path.unlink()
        before, failed, hit = killed_once(how, generation, random.uniform(0, LENGTH))
        assert failed.keys() <= causes, failed
        completed(before)
        hits, tries = hits + hit, tries + 1
    assert hits


@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in FEW else pytest.mark.exhaustive) for kind in KINDS]
)
def test_a_kill_at_a_random_moment_loses_nothing_and_leaves_nothing(workplace, kind):
    try_kind(kind, KILLS)
