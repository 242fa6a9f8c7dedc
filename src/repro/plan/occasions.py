"""Whether another occasion may begin: verdicts take for one what begins less than an hour apart."""

from datetime import UTC, datetime
from pathlib import Path

from repro import paths
from repro.experiments import stored
from repro.plan import jobs
from repro.plan.models import Plan
from repro.records import statistics


def problem(found: Plan, occasion: int) -> str:
    """Why this occasion would not count as one of its own: a point of it was run for another one less than an hour
    ago, or must still be run for the first, and both runs would count as one. "" where nothing is in its way. What failed does
    not count: it may fail each time."""
    mine = [job for job in found.jobs if job.occasion > 1]
    own = {Path(job.record).name for job in mine}
    again = {job.point for job in mine if jobs.unfinished(job)}
    open_first = [job for job in found.jobs if job.occasion == 1 and job.state in ("to run", "stale")]
    if missing := sum(job.point in again for job in open_first):
        return (
            f"--occasion {occasion}: {missing} points of the first occasion are still to run, and runs that begin less"
            " than an hour apart count as one; first run this without --occasion"
        )
    runs = stored.collect(paths.root() / found.results / "records").records.items()
    starts = [run.provenance.start for path, run in runs if path.name not in own and stored.point(run) in again]
    last = max(starts, default=None)
    if last is None or datetime.now(UTC) - last >= statistics.APART:
        return ""
    began, wait = (f"{moment.astimezone():%H:%M}" for moment in (last, last + statistics.APART))
    return (
        f"--occasion {occasion}: too soon: another occasion's last run began at {began}, and runs that begin less"
        f" than an hour apart count as one; allowed from {wait} on"
    )
