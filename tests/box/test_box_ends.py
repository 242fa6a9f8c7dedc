"""`repro box status` and `down` where something is in the way: no root, a network that stays, a process that ends meanwhile."""

import json
import os

import psutil
import pytest
from typer.testing import CliRunner

from repro import cli
from repro.box import BoxError, boxes, cluster, daemons, network
from repro.emulate.netns import FabricError


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A box in name only, whose daemons are none."""
    monkeypatch.setattr(boxes, "FOLDER", tmp_path / "boxes")
    monkeypatch.setattr(boxes, "_MOUNT_POINT", tmp_path / "etc-slurm")
    monkeypatch.setattr(boxes, "_conflict", lambda number: None)
    monkeypatch.setattr(daemons, "running", lambda box: [])
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return boxes.take(2, 8)


class Ended:
    """A process that was there when all were looked for."""

    def name(self):
        raise psutil.NoSuchProcess(1)


@pytest.mark.parametrize("command", ["status", "down"])
def test_without_root_a_box_is_neither_shown_as_down_nor_half_ended(mine, monkeypatch, command):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network, "down", lambda box: pytest.fail("touched without root"))
    found = CliRunner().invoke(cli.app, ["box", command])
    assert found.exit_code == 2 and f"{mine}: needs root" in found.stderr.replace("\n", " ")
    assert boxes.known() == [mine]


def test_a_network_that_stays_is_an_error_with_a_message(mine, monkeypatch):
    def stays(box):
        raise FabricError("`ip link del rb` failed: busy")

    monkeypatch.setattr(network, "down", stays)
    with pytest.raises(BoxError, match="busy"):
        cluster.down()
    assert boxes.known() == [mine], "the next `down` finds it"


def test_a_process_that_ends_meanwhile_is_passed_over(mine, monkeypatch):
    ended = []
    monkeypatch.setattr(daemons, "running", lambda box: [Ended()])
    monkeypatch.setattr(daemons, "_end", lambda processes: ended.extend(processes))
    monkeypatch.setattr(network, "down", lambda box: None)
    assert cluster.status().daemons == {}
    assert cluster.down() and ended and not boxes.known()


def test_a_box_that_has_the_number_of_an_ended_one_stays(mine):
    """Two ended it at a time, and between them somebody started another."""
    boxes.drop(mine)
    other = boxes.take(2, 8)
    assert other.number == mine.number
    boxes.drop(mine)
    assert boxes.known() == [other]


def test_a_number_is_not_lost_with_a_removal_that_was_cut_short(mine, monkeypatch):
    def killed(folder, **options):
        (folder / "owner.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(boxes.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            boxes.drop(mine)
    assert not mine.folder.exists()
    assert boxes.take(2, 8).number == mine.number
    assert not list(boxes.FOLDER.glob(".ended-*"))


def test_programs_are_told_the_configuration(mine):
    told = json.loads(CliRunner().invoke(cli.app, ["box", "status", "--json"]).stdout)
    assert told["SLURM_CONF"] == str(mine.configuration) == str(cluster.configuration())
