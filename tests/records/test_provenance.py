"""What a record says of the code that ran."""

import subprocess
from pathlib import Path

import pytest
from small_checkout import git

from repro import experiments
from repro.jobs import runner
from repro.records import provenance


def committed(folder: Path, message: str) -> str:
    """The commit that this makes."""
    git(folder, "commit", "--quiet", "--allow-empty", "--message", message)
    found = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return found.stdout.strip()


@pytest.mark.parametrize(
    "info, kind",
    [
        ({"cpu family": "25", "model": "1", "flags": "fpu avx avx2 xsave"}, "family 25, model 1, AVX2"),
        (
            {"cpu family": "6", "model": "143", "flags": "avx2 avx512f avx512_bf16"},
            "family 6, model 143, AVX-512 with bfloat16",
        ),
        ({"cpu family": "6", "model": "143", "flags": "avx512f amx_bf16 avx512_bf16"}, "family 6, model 143, AMX"),
        (
            {"CPU implementer": "0x41", "CPU part": "0xd40", "Features": "fp asimd sve"},
            "implementer 0x41, part 0xd40, SVE",
        ),
        ({"flags": "fpu"}, ""),
        ({}, ""),
    ],
)
def test_processors_of_one_name_are_told_apart(info, kind, monkeypatch):
    monkeypatch.setattr(provenance, "_cpuinfo", lambda key: info.get(key, ""))
    assert provenance.cpu_kind() == kind


def test_what_linux_says_of_the_processor_is_read_by_its_whole_name(tmp_path, monkeypatch):
    """`model` is not `model name`."""
    info = tmp_path / "cpuinfo"
    info.write_text("cpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2\n\nmodel\t\t: 2\n")
    monkeypatch.setattr(provenance, "CPUINFO", info)
    assert (provenance.cpu_model(), provenance.cpu_kind()) == ("AMD EPYC", "family 25, model 1, AVX2")
    info.unlink()
    assert provenance.cpu_model() and provenance.cpu_kind() == ""


def test_the_commit_of_a_checkout_that_only_surrounds_it_is_not_told(tmp_path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "bundle").mkdir()
    assert provenance.commit(tmp_path / "bundle") == ("", False)
    assert (committed(tmp_path, "first"), False) == provenance.commit(tmp_path)


def test_a_checkout_whose_files_are_changed_is_told(tmp_path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code.py").write_text("1")
    git(tmp_path, "add", "code.py")
    commit = committed(tmp_path, "first")
    (tmp_path / "notes").touch()
    assert provenance.commit(tmp_path) == (commit, False), "what is not tracked is no code"
    provenance.commit.cache_clear()
    (tmp_path / "code.py").write_text("2")
    assert provenance.commit(tmp_path) == (commit, True)


def test_a_checkout_of_which_git_does_not_say_counts_as_changed(tmp_path, monkeypatch):
    git(tmp_path, "init", "--quiet")
    commit, run = committed(tmp_path, "first"), subprocess.run

    def slow(words, **options):
        if "status" in words:
            raise subprocess.TimeoutExpired(words, 20)
        return run(words, **options)

    monkeypatch.setattr(provenance.subprocess, "run", slow)
    assert provenance.commit(tmp_path) == (commit, True)


def test_a_checkout_that_git_does_not_tell_of_counts_as_changed(tmp_path, monkeypatch):
    """As that of another user, whom git does not trust."""
    git(tmp_path, "init", "--quiet")
    committed(tmp_path, "first")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    provenance.commit.cache_clear()
    assert provenance.commit(tmp_path) == ("", True)


def test_a_lock_that_an_editor_keeps_beside_a_configuration_is_none(project):
    """Emacs's is a link to nothing: points lost their records to it."""

    def found() -> str:
        return provenance.collect("repro.experiments.flover_queue", provenance.now()).config_hash

    before = found()
    (project / "config/.#config.yaml").symlink_to("me@host.17:1")
    assert found() == before


def test_a_record_has_the_commit_that_ran(project, monkeypatch):
    """Not one made while it ran."""
    git(project, "init", "--quiet")
    first = committed(project, "first")

    def run(self, point):
        committed(project, "meanwhile")
        raise ValueError("enough")

    monkeypatch.setattr(experiments.base.Experiment, "run", run)
    found = runner.run("flover_queue", experiments.get("flover_queue").parameters())
    assert found.detail.endswith("enough\n") and found.provenance.git_commit == first
