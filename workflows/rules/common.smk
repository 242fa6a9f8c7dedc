# What the rules share: the plan, and functions that read it.
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

# Jobs call `repro` of the environment that runs this workflow, also when it is not activated.
BIN = shlex.quote(str(Path(sys.executable).parent))
shell.prefix("set -euo pipefail; PATH={BIN}:$PATH; ")  # the first is Snakemake's own, which a prefix replaces


def keep_plan():
    """Have `repro plan` list every point in a file, and return its path. It checks all configuration; its message is
    all a user should see."""
    options = [f"--{key}={value}" for key, value in config.items()]
    command = [sys.executable, "-m", "repro", "plan", "--keep", *options]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        raise WorkflowError(found.stderr.strip())
    print(found.stderr, end="", file=sys.stderr)  # from when another occasion counts as one, say
    return found.stdout.strip()


OPTIONS = ("tier", "platform", "occasion", "claim")
if unknown := config.keys() - set(OPTIONS):
    raise WorkflowError(f"--config: unknown {', '.join(sorted(unknown))}; allowed: {', '.join(OPTIONS)}")

# The plan decides what runs. A job on another node reads the workflow again and must find the plan that it was
# submitted with, whatever other calls of Snakemake have made of it since: so each call has a file of its own, and jobs
# inherit its name (sbatch passes the environment on).
VARIABLE = "REPRO_PLAN"
if workflow.is_main_process:
    os.environ[VARIABLE] = keep_plan()
elif VARIABLE not in os.environ:
    raise WorkflowError(
        f"{VARIABLE} is not set: jobs need the environment of the snakemake that submits them (sbatch --export=ALL)"
    )
PLAN_FILE = Path(os.environ[VARIABLE])
PLAN = json.loads(PLAN_FILE.read_text())
RUN = Path(PLAN["results"]).name
JOBS = {job["record"]: job for job in PLAN["jobs"]}
ALLOCATIONS = {allocation["name"]: allocation for allocation in PLAN["allocations"]}
MADE_BY = {record: name for name, allocation in ALLOCATIONS.items() for record in allocation["jobs"]}
CLAIMS = [
    "config/claims.yaml",
    "config/explanations.yaml",
    *map(str, sorted(Path("data/published").glob("[!.]*.csv"))),
]
SLURM = PLAN["slurm"]  # None where points are local processes
READ_HERE = not SLURM or SLURM["settings"]["readers"] == "driver"
if SLURM and SLURM["missing"]:
    raise WorkflowError("\n".join(SLURM["missing"]))


def check_paths():
    """Snakemake reads braces in the names of folders as wildcards. Its plugin for Slurm puts the checkout's path into a
    job's command between double quotes, and that of Python as it is."""
    checkout, odd = f"{workflow.basedir}, {os.getcwd()}", '{}$`"\\' if SLURM else "{}"
    if found := sorted(set(checkout) & set(odd)):
        raise WorkflowError(f"{checkout}: found {' '.join(found)}; allowed: a path without any of {' '.join(odd)}")
    if SLURM and shlex.quote(sys.executable) != sys.executable:
        raise WorkflowError(f"{sys.executable}: allowed in jobs: a path of letters, digits and @ % _ - + = : , . /")


check_paths()


def one_of(names):
    """Regular expression of these names and no others: of another target, Snakemake then says that no rule makes it."""
    return "|".join(map(re.escape, names)) or "(?!)"


wildcard_constraints:
    run=one_of([RUN, "replot"]),
    experiment=one_of(PLAN["experiments"]),
    job=one_of(Path(record).stem for record in JOBS),
    allocation=one_of(ALLOCATIONS),


def figures(notebook):
    """Names of the figures that a notebook draws."""
    return [name for name, figure in PLAN["figures"].items() if figure["notebook"] == notebook]


def read_by(notebook):
    """Experiments whose records a notebook's figures show."""
    return {name for figure in figures(notebook) for name in PLAN["figures"][figure]["experiments"]}


def record_folder(wildcards):
    """Where a run's records are: its own, or the shipped ones for `replot`."""
    return f"{PLAN['reference'] if wildcards.run == 'replot' else PLAN['results']}/records"


def beside(wildcards):
    """Parameter function: the shipped records that a run's own are shown beside. Those of `replot` are its input."""
    return "" if wildcards.run == "replot" else PLAN["shipped_hash"]


def done_file(allocation):
    """What an allocation writes when all its points have a record. (Its records are no output: Snakemake would put
    back the old ones when a job dies, and finished work with it.)"""
    return f"{PLAN['results']}/done/{allocation}.json"


def of_allocation(key):
    """Resource function: something of an allocation."""
    return lambda wildcards: ALLOCATIONS[wildcards.allocation][key]


def cores(wildcards):
    """Threads of an allocation: timed points have the machine for themselves."""
    timed = PLAN["experiments"][ALLOCATIONS[wildcards.allocation]["experiment"]]
    return workflow.cores if timed and not SLURM else 1


def unfinished(wildcards):
    """Input function: the plan, which is newer than any record, for a point that is not done; nothing for the others.

    The plan alone decides: a failed, stale or truncated record is made again, whatever Snakemake remembers.
    """
    record = f"results/{wildcards.run}/records/{wildcards.experiment}/{wildcards.job}.json"
    return [str(PLAN_FILE)] if record in MADE_BY else []


def check_jobs():
    """The profile says how many jobs wait or run at once; more than the queue takes would be refused one by one."""
    limit, found = SLURM["settings"]["queued_jobs"], workflow.resource_settings.nodes
    if found is not None and limit < found < sys.maxsize:
        raise WorkflowError(
            f"config/platforms/{PLAN['platform']}.yaml: slurm.queued_jobs: found {limit},"
            f" and the profile's `jobs` (--jobs) is {found}; allowed: no more jobs than the queue takes"
        )


def submission():
    """Resources of every Slurm job, quoted for the shell by the plan. Nothing where there is no Slurm."""
    return SLURM["submission"] if SLURM else {}


def beginning(wildcards):
    """Parameter function (in a text, Snakemake would look for wildcards): shell commands that begin a Slurm job."""
    return SLURM["beginning"] if SLURM else ""


def of_job():
    """Resources of a Slurm job that runs an allocation."""
    if not SLURM:
        return {}
    return {
        # The job starts its ranks itself: with this, Snakemake's plugin puts no srun of one task around it.
        "mpi": "srun",
        "nodes": of_allocation("nodes"),
        "tasks_per_node": SLURM["tasks_per_node"],
        "cpus_per_task": SLURM["settings"]["cores_per_rank"],
        "runtime": of_allocation("minutes"),
    }


def in_turn(wildcards):
    """In the order of the plan, so that runs which are compared are near each other; Snakemake alone takes any."""
    return len(ALLOCATIONS) - list(ALLOCATIONS).index(wildcards.allocation)


def in_plan(wildcards):
    """The same, of points that are asked for by the names of their records."""
    record = f"results/{wildcards.run}/records/{wildcards.experiment}/{wildcards.job}.json"
    return len(JOBS) - list(JOBS).index(record)


def made(experiments):
    """What there is when all points of some experiments have a record."""
    wanted = (path for path, job in JOBS.items() if job["experiment"] in experiments)
    return list(dict.fromkeys(done_file(MADE_BY[path]) if path in MADE_BY else path for path in wanted))


def records(experiments):
    """Input function: the records of some experiments."""

    def find(wildcards):
        if wildcards.run != "replot":
            return made(experiments)
        shipped = sorted(Path(record_folder(wildcards)).glob("*/*.json"))
        return [str(path) for path in shipped if path.parent.name in experiments]

    return find
