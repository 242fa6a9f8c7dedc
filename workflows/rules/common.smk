# What the rules share: the plan, and functions that read it.
import json
import shlex
import subprocess
import sys
from pathlib import Path

# Jobs call `repro` of the environment that runs this workflow, also when it is not activated.
shell.prefix(f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH; ")


def load_plan():
    """Ask `repro plan` for every point. It checks all configuration; its message is all a user should see."""
    if unknown := set(config) - {"tier", "platform"}:
        raise WorkflowError(f"--config: unknown {', '.join(sorted(unknown))}; allowed: tier, platform")
    options = [f"--{key}={value}" for key, value in config.items()]
    found = subprocess.run(
        [sys.executable, "-m", "repro", "plan", "--json", *options],
        capture_output=True,
        text=True,
    )
    if found.returncode:
        raise WorkflowError(found.stderr.strip())
    return json.loads(found.stdout)


PLAN = load_plan()
RUN = Path(PLAN["results"]).name
JOBS = {job["record"]: job for job in PLAN["jobs"]}
PLAN_FILE = Path(PLAN["results"], "plan.json")

if workflow.is_main_process:  # a job on another node reads the workflow again, and must not renew the file
    PLAN_FILE.parent.mkdir(parents=True, exist_ok=True)
    PLAN_FILE.write_text(json.dumps(PLAN, indent=1))


wildcard_constraints:
    run=f"{RUN}|replot",
    job="[^/]+",


def figures(notebook):
    """Names of the figures that a notebook draws."""
    return [name for name, figure in PLAN["figures"].items() if figure["notebook"] == notebook]


def pictures(notebook):
    """Path patterns of a notebook's figures."""
    return [f"results/{{run}}/figures/{name}.png" for name in figures(notebook)]


def record_folder(wildcards):
    """Where a run's records are: its own, or the shipped ones for `replot`."""
    return f"{PLAN['reference'] if wildcards.run == 'replot' else PLAN['results']}/records"


def records(*experiments):
    """Input function: the records of some experiments (all of them when none is named)."""

    def find(wildcards):
        if wildcards.run == "replot":
            shipped = Path(record_folder(wildcards))
            return [
                str(path)
                for path in sorted(shipped.glob("*/*.json"))
                if not experiments or path.parent.name in experiments
            ]
        return [path for path, job in JOBS.items() if not experiments or job["experiment"] in experiments]

    return find


def arguments(wildcards, output):
    """Params function: arguments of `repro run`. It asks `output`, so that Snakemake does not remember them: see below."""
    return JOBS[output[0]]["arguments"]


def unfinished(experiment):
    """Input function: the plan, which is newer than any record, for a point that is not done; nothing for the others.

    So the plan alone decides what is run: a failed, stale or truncated record is made again, whatever Snakemake remembers.
    """

    def find(wildcards):
        job = JOBS[f"results/{wildcards.run}/records/{experiment}/{wildcards.job}.json"]
        return [] if job["state"] in ("done", "skipped") else [str(PLAN_FILE)]

    return find
