"""`repro reproduce`: run what is missing through Snakemake, with one display of the whole run, and say what came out."""

import contextlib
import fcntl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from repro import experiments, paths
from repro.claims import compare, registry, sides
from repro.claims.claim import Claim
from repro.cli import verdicts, whole
from repro.cli.compare import summarise
from repro.cli.console import stderr, stdout, without_display
from repro.emulate import netns
from repro.experiments import stored
from repro.jobs import journal, runner
from repro.plan import jobs as plan
from repro.plan import occasions
from repro.plan.models import Job, Plan
from repro.records import provenance, record
from repro.report import figures

_LOOK_S = 0.5
_LINE_S = 60.0  # between lines where the display is no terminal
_ALL = ("points", "all")  # names of every point, and of what is made of them
_OUTDATED = "outdated"  # of the points whose shipped records the present code did not make


def run(found: Plan, target: str | None, verbose: bool, occasion: int = 1) -> int:
    """Announce the run, show it until Snakemake ends, and summarise it. Exit code of Snakemake; SystemExit with 130 after
    Ctrl-C, 143 after SIGTERM, 129 after SIGHUP. ValueError for a platform whose points are Slurm jobs, for an occasion that begins together with
    another or too soon after it, and where another such run goes on in the same folder."""
    if found.slurm is not None:
        raise ValueError(
            f"--platform {found.platform}: its points are Slurm jobs; submit them with"
            " `snakemake --profile workflows/profiles/NAME` (docs/slurm.md)"
        )
    found = _needed(found, target, occasion)
    if target == _OUTDATED and not found.jobs:
        stdout.print(f"every shipped record of tier {found.tier}, occasion {occasion}, is of the present code")
        return 0
    if occasion > 1 and (problem := occasions.problem(found, occasion)):
        raise ValueError(problem)
    log = paths.root() / found.results / "snakemake.log"
    with _alone(log) as output:
        _announce(found, target)
        words = [sys.executable, "-m", "snakemake", "--profile", "none"]  # SNAKEMAKE_PROFILE might submit to a cluster
        words += ["--config", f"tier={found.tier}", f"platform={found.platform}", f"occasion={occasion}"]
        words += ["--", *_targets(found, target)]
        streams: dict[str, Any] = {} if verbose else {"stdout": output, "stderr": subprocess.STDOUT}
        with whole.started(words, cwd=paths.root(), pass_fds=(output.fileno(),), **streams) as snakemake:
            if not verbose:
                _show(_Watch(found), snakemake)
            code = snakemake.wait()
    if not code:
        report = f"{found.results}/report.html"
        _summarise(found) if target in (None, "all", report) else _answer(found, _named(found, target) or target)
        _tell_missing(found)
    elif not verbose:
        stderr.print(f"[bold red]Snakemake ended with code {code}[/]; the end of {escape(str(log))}:", soft_wrap=True)
        stderr.print(escape("\n".join(log.read_text(errors="replace").splitlines()[-15:])), soft_wrap=True)
    return code


def _targets(found: Plan, target: str | None) -> list[str]:
    """What Snakemake makes: of a claim, its points; of a figure, those of the experiments that it reads. Its own rule for
    a figure runs the whole notebook."""
    if target in found.figures:
        return found.figures[target].experiments
    if target == _OUTDATED or any(claim.id == target for claim in registry.load()):
        return [job.record for job in found.jobs]
    return [target] if target else []


def _needed(found: Plan, target: str | None, occasion: int = 1) -> Plan:
    """The plan of the points that a claim, an experiment, a notebook, a figure or a file asks for, or of an occasion's
    that are outdated. ValueError for a name of none of them."""
    target = _named(found, target)
    claim = next((claim for claim in registry.load() if claim.id == target), None)
    shown = [each for name, each in found.figures.items() if target in (name, each.notebook)]
    reads = {name for each in shown for name in each.experiments} or {target} & found.experiments.keys()
    if claim is not None:
        jobs = read_by(claim, found.jobs, found.tier)
    elif reads:
        jobs = [job for job in found.jobs if job.experiment in reads]
        if target in found.experiments and not jobs:
            raise ValueError(
                f"{target}: tier {found.tier} has no point of this experiment; config/config.yaml has the tiers"
            )
    elif target == _OUTDATED:
        present = _present(found)
        jobs = [job for job in found.jobs if job.occasion == occasion and _name(job.record) not in present]
    elif target == "replot":
        jobs = []
    elif not (jobs := [job for job in found.jobs if job.record == target]):
        _check_name(found, target)
        return found
    minutes = plan.minutes_of(list(filter(plan.unfinished, jobs)))
    return found.model_copy(update={"jobs": jobs, "minutes": minutes})


def _present(found: Plan) -> set[str]:
    """Experiments and files of the shipped records that the present code made."""
    runs = stored.collect(paths.root() / found.reference / "records").records
    return {_name(path) for path in runs.keys() - provenance.older(runs)}


def _name(record: str | Path) -> str:
    return "/".join(Path(record).parts[-2:])


def _check_name(found: Plan, target: str | None) -> None:
    """ValueError for what Snakemake has no rule for; which files it makes, it says itself."""
    known = {
        *_ALL,
        _OUTDATED,
        *figures.NOTEBOOKS,
        *found.figures,
        *found.experiments,
        *(claim.id for claim in registry.load()),
    }
    if target is not None and "/" not in target and target not in known:
        near = experiments.closest(target, known)
        raise ValueError(
            f"target: found {target!r}{near}; allowed: a claim (docs/claims.md), a figure (`repro plan` names them), a"
            f" notebook, an experiment, a file, {', '.join(_ALL)} or {_OUTDATED} (results/README.md)"
        )


def _named(found: Plan, target: str | None) -> str | None:
    """Of a file of a figure or a notebook, the notebook, which makes it; of one of `replot`, that."""
    folder, _, file = (target or "").rpartition("/")
    name = file.partition(".")[0]
    if folder == f"{found.results}/figures" and name in found.figures:
        return found.figures[name].notebook
    if folder == f"{found.results}/notebooks":
        return name
    return "replot" if f"{folder}/".startswith("results/replot/") else target


def read_by(claim: Claim, jobs: Sequence[Job], tier: str) -> list[Job]:
    """The points that the shipped runs of a claim have; where there are none, all that it may read. ValueError where
    the tier lacks one."""
    if claim.value is None:
        raise ValueError(f"{claim.id}: no experiment in this version reads it; it needs {claim.needs}")
    runs = []
    if tier != "cluster":  # that has the papers' sizes, of which no run is shipped
        shipped = sides.shipped([claim])
        runs = [run for name, run in shipped.runs.items() if name in shipped.verdicts[0].records]
    read = {stored.point(run) for run in runs}
    of_it = [job for job in jobs if job.experiment == claim.value.experiment and claim.value.may_read(dict(job.point))]
    own = {job.point for job in of_it}
    if not own or (lacking := read - own):
        lacks = f"{len(lacking)} of the {len(read)} points that it reads" if own else "all of its points"
        raise ValueError(f"{claim.id}: tier {tier} lacks {lacks}; docs/claims.md has the tier")
    return [job for job in of_it if job.point in (read or own)]


@contextlib.contextmanager
def _alone(log: Path) -> Iterator[IO[str]]:
    """Snakemake's log, emptied and locked: of two Snakemakes in one folder each would delete the figures that the other
    draws. Snakemake inherits the lock, so it lasts while that runs, even after this process was killed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{log.parent}: another `repro reproduce` runs here; wait for it, or end it") from None
        except OSError:  # no locks on this file system
            pass
        output.truncate(0)
        yield output


def _announce(found: Plan, target: str | None) -> None:
    to_run = list(filter(plan.unfinished, found.jobs))
    minutes = f"{found.minutes:.0f}"
    told = f"{len(to_run)} of {len(found.jobs)} points of tier {found.tier} to run, about {minutes} minute"
    told += "" if minutes == "1" else "s"
    told += f" for {target}" if target else f", with figures, verdicts and {found.results}/report.html"
    stdout.print(escape(told), soft_wrap=True)
    wanted = {job.experiment for job in to_run}
    mine = [claim for claim in registry.load() if claim.value and claim.value.experiment in wanted]
    without = sum(claim.needs_shaped_links for claim in mine)
    if without and (reason := netns.unavailable()):
        claims = "1 claim" if without == 1 else f"{without} claims"
        stdout.print(
            f"Links between ranks cannot be shaped here ({escape(reason)}): {claims} will be *not run*."
            " As root on Linux with iproute2 they are judged.",
            soft_wrap=True,
        )


class _Watch:
    """What can be seen of a run from outside: its records, its journal, and the verdicts they allow."""

    def __init__(self, found: Plan) -> None:
        self.plan = found
        self.open = {job.record: job for job in found.jobs if plan.unfinished(job)}
        self.total, self.failed, self.verdict = len(self.open), 0, ""
        self.began, self.planned_minutes = time.monotonic(), found.minutes

    def look(self) -> None:
        """Take note of new records; once an experiment has all of them, judge its claims beside the run."""
        complete = set()
        for name, job in list(self.open.items()):
            path = paths.root() / name
            # What is no record is no finished point; what is put in place in this instant some file systems cannot read.
            with contextlib.suppress(record.RecordError, OSError):
                if path.stat().st_mtime >= self.plan.made.timestamp():
                    self.failed += stored.read(path).status == "failed"
                    del self.open[name]
                    complete.add(job.experiment)
        complete -= {job.experiment for job in self.open.values()}
        for experiment in sorted(complete):
            threading.Thread(target=self._judge, args=(experiment,), daemon=True).start()

    def _judge(self, experiment: str) -> None:
        with runner.machine(timed=False, silent=True):  # not while a timed point runs
            runs = stored.collect(paths.root() / self.plan.results / "records" / experiment).records
            mine = [claim for claim in registry.load() if claim.value and claim.value.experiment == experiment]
            for verdict in registry.evaluate(mine, runs):
                if verdict.agreement not in ("not run", "skipped"):
                    paper, ours = registry.numbers(verdict)
                    self.verdict = (
                        f"{verdict.id} {verdict.title}: {ours} ({registry.whose(verdict)} {paper}): {verdict.agreement}"
                    )

    def running(self) -> list[str]:
        entries = journal.entries(self.plan.results)
        return [f"{e.running.experiment} {Path(e.running.record).stem}" for e in entries if e.running is not None]

    def minutes_left(self) -> float:
        """Expected minutes of what is left, in the speed that this run has had so far."""
        left = plan.minutes_of(list(self.open.values()))
        spent, planned = (time.monotonic() - self.began) / 60, self.planned_minutes - left
        return left * min(3.0, max(0.3, spent / planned)) if planned > 1 else left


def _show(watch: _Watch, snakemake: "subprocess.Popen[Any]") -> None:
    """Display the run until Snakemake ends: on a terminal in place, else a line now and then."""
    columns = (TextColumn("points"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, TextColumn("{task.fields[left]}"), console=stderr)
    task = bar.add_task("", total=watch.total, left="")
    said = 0.0
    with Live(console=stderr, transient=True, auto_refresh=False) as live:
        while snakemake.poll() is None:
            watch.look()
            left, *others = _lines(watch)
            done = watch.total - len(watch.open)
            bar.update(task, completed=done, left=left)
            if stderr.is_terminal:
                below = [Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in others]
                live.update(Group(bar, *below), refresh=True)
            elif time.monotonic() - said > _LINE_S:
                said = time.monotonic()
                line = "; ".join([f"{done} of {watch.total} points", left, *others])
                stderr.print(escape(line), soft_wrap=True)
            time.sleep(_LOOK_S)


def _lines(watch: _Watch) -> list[str]:
    left = f"about {watch.minutes_left():.0f} min left" if watch.open else "figures, verdicts, report"
    left += f", {watch.failed} failed" if watch.failed else ""
    running = watch.running()
    return [left, *([f"running: {', '.join(running)}"] if running else []), *filter(None, [watch.verdict])]


def _answer(found: Plan, target: str) -> None:
    """The claim, or those that a figure, a notebook or an experiment answers, beside the shipped records; a figure is
    drawn."""
    known = registry.load()
    shown = [figures.FIGURES[target]] if target in figures.FIGURES else []
    shown += [each for each in figures.FIGURES.values() if each.notebook == target]
    asked = {claim for each in shown for claim in each.claims}
    if not shown:
        asked = {claim.id for claim in known if target in (claim.id, claim.value and claim.value.experiment)}
    results = paths.root() / found.results
    if target in figures.FIGURES:
        without_display()
        from repro.report.figures import base  # matplotlib

        base.draw(target, results / "records", results / "figures")
        stdout.print(escape(f"Figure: {results / 'figures' / target}.png"), soft_wrap=True)
    if claims := [claim for claim in known if claim.id in asked]:
        here, shipped = sides.read("here", results, claims), sides.shipped(claims)
        stdout.print()
        verdicts.show_beside("claim", here.verdicts, compare.of_claims(claims, here, shipped))
        names = " ".join(claim.id for claim in claims)
        told = f"Verdicts of these runs alone: repro claims {names} --results {found.results}"
        stdout.print(escape(told), soft_wrap=True)
    elif not shown:  # of all points, of a file, or of all figures of the shipped records
        where = "results/replot" if target == "replot" else found.results
        stdout.print(escape(f"Done: {paths.root() / where}"), soft_wrap=True)


def _tell_missing(found: Plan) -> None:
    """How many points left no numbers, which neither the exit code nor a table of claims says."""
    states = Counter(plan.state(paths.root() / job.record)[0] for job in found.jobs)
    where = escape(f"their records in {found.results}/records say why")
    if count := states["failed"]:
        told = f"[bold red]{count} of {len(found.jobs)} points failed[/]: {where}; the same command tries them again"
        stdout.print(told, soft_wrap=True)
    if count := states["skipped"]:
        told = f"{count} of {len(found.jobs)} points were skipped: {where}; without these records they run again"
        stdout.print(told, soft_wrap=True)


def _summarise(found: Plan) -> None:
    """One screen, unless it is narrow: the primary claims beside the shipped records, and a tally of each paper."""
    claims = registry.load()
    here = sides.read("here", paths.root() / found.results, claims)
    beside = compare.compare(claims, here, sides.shipped(claims))
    stdout.print()
    primary = [row for row in here.verdicts if row.primary]
    verdicts.show_beside("primary claim", primary, beside.claims)
    for key, paper in registry.papers().items():
        rows = [row for row in here.verdicts if row.id.startswith(f"{key}-")]
        stdout.print(f"arXiv {paper.id} ({key}): {registry.tally(rows)}", soft_wrap=True)
    stdout.print(escape(f"Beside the shipped records ({found.reference}):"), soft_wrap=True)
    summarise(beside)
    stdout.print(escape(f"Report: {paths.root() / found.results / 'report.html'}"), soft_wrap=True)
