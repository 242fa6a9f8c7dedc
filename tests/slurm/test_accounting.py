"""Where Slurm keeps accounts, a record says what its step took."""

import os
import subprocess

import pytest
from slurm_box import boxed, lacking, own
from slurm_job import QUICK, SECONDS, Job

if reason := lacking(accounting=True):
    pytest.skip(reason, allow_module_level=True)
pytestmark = [pytest.mark.root, pytest.mark.box, pytest.mark.xdist_group("network")]


@pytest.fixture(scope="module", autouse=True)
def box(module_project):
    with boxed(nodes=1, accounting=True):
        yield


def test_a_record_knows_its_steps_time_and_memory():
    job = Job("accounts", QUICK, SECONDS, options=["--account=root"])
    found = [run.provenance.slurm for run in job.ended(seconds=120)]
    assert [said["SLURM_STEP_ID"] for said in found] == ["0", "1"]
    assert all(said["SLURM_JOB_ID"] == job.id and said["SLURM_JOB_NODELIST"] == "node1" for said in found)
    assert all(said["ExitCode"] == "0:0" and "Elapsed" in said for said in found)
    assert int(found[1]["MaxRSS"].removesuffix("K")) > 100_000  # torch alone is more


def test_the_database_is_roots_alone():
    """Root of the kernel is let in, without a password; others do not reach the socket, and would not be let in."""
    folder = own().folder
    modes = {name: (folder / name).stat().st_mode & 0o777 for name in ("db", "log", "state", "etc/munge.key")}
    assert modes == {"db": 0o700, "log": 0o700, "state": 0o700, "etc/munge.key": 0o600}
    assert (folder / "etc/slurmdbd.conf").stat().st_mode & 0o777 == 0o600
    socket = folder / "db/mysql.sock"
    asking = ["mariadb", "--no-defaults", f"--socket={socket}", "-N", "-e", "select user, host from mysql.user"]
    users = subprocess.run(asking, capture_output=True, text=True, check=True).stdout
    assert "root\tlocalhost" in users and "%" not in users and "\n\t" not in f"\n{users}"
    other = subprocess.run(asking, capture_output=True, text=True, user="nobody")
    assert other.returncode and f"'{socket}' (13)" in other.stderr, "EACCES"
    os.chmod(folder / "db", 0o755)  # as if the folder were no obstacle
    other = subprocess.run([*asking, "--user=root"], capture_output=True, text=True, user="nobody")
    os.chmod(folder / "db", 0o700)
    assert other.returncode and "Access denied" in other.stderr
