"""Where Slurm keeps accounts, a record says what its step took."""

import pytest
from slurm_box import boxed, lacking
from slurm_job import QUICK, SECONDS, Job

if reason := lacking(accounting=True):
    pytest.skip(reason, allow_module_level=True)
pytestmark = [pytest.mark.root, pytest.mark.box, pytest.mark.xdist_group("network")]


def test_a_record_knows_its_steps_time_and_memory(project):
    with boxed(nodes=1, accounting=True):
        job = Job("accounts", QUICK, SECONDS, options=["--account=root"])
        found = [run.provenance.slurm for run in job.ended(seconds=120)]
    assert [said["SLURM_STEP_ID"] for said in found] == ["0", "1"]
    assert all(said["SLURM_JOB_ID"] == job.id and said["SLURM_JOB_NODELIST"] == "node1" for said in found)
    assert all(said["ExitCode"] == "0:0" and "Elapsed" in said for said in found)
    assert int(found[1]["MaxRSS"].removesuffix("K")) > 100_000  # torch alone is more
