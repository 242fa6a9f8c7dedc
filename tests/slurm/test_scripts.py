"""What is submitted on Frontier and on NVIDIA clusters, shown to a Slurm with their partitions, nodes and GPUs by name."""

import re
import subprocess
from pathlib import Path

import pytest
from slurm_box import boxed

from repro import paths

pytestmark = pytest.mark.xdist_group("network")
GOLDEN = Path(__file__).parent / "golden"
NODES = 4
SITES = {"frontier": ["-A", "abc123"], "nvidia": ["-A", "abc123", "-p", "gpu"]}


def test_only(*arguments):
    """(accepted, what Slurm says): nothing is queued."""
    done = subprocess.run(["sbatch", "--test-only", *arguments], capture_output=True, text=True, cwd=paths.root())
    return done.returncode == 0, done.stderr


test_only.__test__ = False  # the name is sbatch's


def submitted(site):
    """Options of every job in the golden file, by its number of nodes."""
    for block in (GOLDEN / f"{site}.txt").read_text().split("sbatch\n")[1:]:
        words = [line.strip() for line in block.split("    --wrap\n")[0].splitlines()]
        kept = words[: words.index("--output")] + words[words.index("--output") + 2 :]
        kept = kept[: kept.index("-D")]
        nodes = next(int(word.partition("=")[2]) for word in kept if word.startswith("--nodes="))
        yield nodes, kept


@pytest.fixture(scope="module", params=SITES)
def site(request):
    with boxed(nodes=NODES, like=request.param):
        yield request.param


@pytest.mark.root
@pytest.mark.box
def test_jobs_of_the_profile_are_accepted(site):
    jobs = list(submitted(site))
    assert len(jobs) >= 3
    for nodes, options in jobs:
        accepted, said = test_only(*options, "--wrap=true")
        assert accepted == (nodes <= NODES), said
        assert accepted or "requested than permitted" in said, said


@pytest.mark.root
@pytest.mark.box
def test_the_script_by_hand_is_accepted(site):
    script = f"slurm/{site}/point.sbatch"
    accepted, said = test_only(*SITES[site], "-N2", script, "zero_train")
    assert accepted and re.search(r"node\[\d-\d\]|node\d", said), said


@pytest.mark.root
@pytest.mark.box
@pytest.mark.parametrize(
    "wrong",
    [
        ["-N5"],
        ["--gpus-per-node=9"],
        ["--time=2-00:00:00"],
        ["--cpus-per-task=20", "--ntasks-per-node=8"],
        ["-C", "moon"],
    ],
)
def test_what_does_not_fit_is_refused(site, wrong):
    accepted, _ = test_only(*SITES[site], "-N2", *wrong, f"slurm/{site}/point.sbatch", "zero_train")
    assert not accepted


@pytest.mark.parametrize("name", ["environment.sh", "point.sbatch"])
@pytest.mark.parametrize("place", ["frontier", "nvidia"])
def test_scripts_are_sound_shell(place, name):
    subprocess.run(["bash", "-n", paths.root() / f"slurm/{place}/{name}"], check=True)


@pytest.mark.parametrize("place", ["frontier", "nvidia", "box"])
def test_every_variable_says_why(place):
    """A line that sets a variable has its reason beside it, or above the lines that belong together."""
    lines = (paths.root() / f"slurm/{place}/environment.sh").read_text().splitlines()
    for number, line in enumerate(lines):
        if line.strip().startswith("export "):
            above = next(text for text in reversed(lines[:number]) if not text.strip().startswith(("export ", "GLOO")))
            assert "#" in line or above.strip().startswith(("#", "srun", "sbcast", "staged")), line
