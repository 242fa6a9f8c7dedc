"""What the pages say beside claims: minutes and points of the tiers, disk, machines, versions, artifacts."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repro import paths
from repro.plan import config, jobs
from repro.plan.models import Job
from repro.records.record import Record
from repro.report import figures
from repro.report.docs.table import Row, minutes

_CORES = 2  # of the machine whose minutes are told, whichever writes the pages
_PROMISE = re.compile(
    r"environment in \S+: (?P<environment>\d+) minutes, (?P<gb>[\d.]+) GB with a CPU build of torch,"
    r" (?P<cuda_gb>[\d.]+) GB with CUDA.*points: (?P<laptop>\d+) minutes on 2 cores, (?P<smoke>\d+) for make smoke",
    re.DOTALL,
)


@dataclass(frozen=True)
class Tier:
    """Points, and minutes until all of them have run and are shown."""

    jobs: Sequence[Job]

    @property
    def points(self) -> int:
        return len(self.jobs)

    @property
    def minutes(self) -> float:
        return jobs.minutes_of(self.jobs, _CORES)

    def of(self, experiments: Sequence[str]) -> float:
        """Until the points of some experiments have run."""
        mine = [job for job in self.jobs if job.experiment in experiments]
        return jobs.minutes_of(mine, _CORES) - jobs.minutes_of([], _CORES)

    @property
    def words(self) -> str:
        return f"{self.minutes:.0f} minutes" if self.minutes < 90 else f"{self.minutes / 60:.1f} hours"


@dataclass(frozen=True)
class Artifact:
    """A notebook with its figures, the experiments that they read, and the claims that these answer."""

    name: str
    title: str
    paper: str
    figures: Sequence[str]
    experiments: Sequence[str]
    rows: Sequence[Row]


@dataclass(frozen=True)
class Part:
    """Claims that one command answers: the command, its minutes and occasions, and what it needs."""

    command: str
    rows: Sequence[Row]

    @property
    def minutes(self) -> str:
        return minutes(self.rows)

    @property
    def occasions(self) -> int:
        return max(row.occasions for row in self.rows)

    @property
    def starts(self) -> int:
        """How often something is started: a command for each claim, on every occasion."""
        return self.occasions * len(self.rows)

    @property
    def needs(self) -> str:
        found = dict.fromkeys(row.needs for row in self.rows)
        return "; or ".join(one for one in found if not any(one != other and one in other for other in found))

    @property
    def results(self) -> str:
        """Option of `repro claims` for the folder of these runs; empty for that of the default tier."""
        _, tier, name = self.command.partition(" --tier ")
        return f" --results {config.results_folder(*config.load(name.split()[0]))}" if tier else ""


def promises() -> dict[str, str]:
    """What `make` announces before it begins: minutes of the environment and of points, GB. ValueError where the
    Makefile has no such lines."""
    found = _PROMISE.search((paths.root() / "Makefile").read_text())
    if found is None:
        raise ValueError(f"{paths.root() / 'Makefile'}: announce: found other words; allowed: {_PROMISE.pattern}")
    return found.groupdict()


def tiers() -> dict[str, Tier]:
    """Every tier that one machine runs, by name."""
    return {name: Tier(jobs.make(name).jobs) for name in ("smoke", "laptop", "full", "gpu")}


def occasion() -> Tier:
    """What a further occasion of the laptop's tier runs."""
    return Tier([job for job in jobs.make("laptop", occasion=2).jobs if job.occasion == 2])


def artifacts(rows: Sequence[Row]) -> list[Artifact]:
    """The notebooks in the order of the catalogue, but for the one that shows verdicts alone."""
    return [
        Artifact(
            name=name,
            title=notebook.title,
            paper=notebook.paper,
            figures=list(notebook.figures),
            experiments=sorted({e for figure in notebook.figures for e in figures.entry(figure).reads}),
            rows=[row for row in rows if row.notebook == name],
        )
        for name, notebook in figures.NOTEBOOKS.items()
        if any("reads" in entry for entry in notebook.figures.values())
    ]


def parts(rows: Sequence[Row]) -> list[Part]:
    """Rows by the command that answers them; those that none answers are left out."""
    commands = dict.fromkeys(row.command for row in rows if row.command)
    return [Part(command, [row for row in rows if row.command == command]) for command in commands]


def machines(runs: Sequence[Record]) -> list[str]:
    """Distinct machines of the records in words, that of most first."""
    found = Counter(
        f"{one.cores} processors ({one.processor}), {one.memory_gib:.0f} GiB, {', '.join(one.gpu) or 'no GPU'}, {_system(one.os)}"
        for one in (run.provenance for run in runs)
    )
    return [f"{machine}: {count} record{'s' * (count > 1)}" for machine, count in found.most_common()]


def _system(name: str) -> str:
    """`Linux 6.18`, without what a distribution adds."""
    return " ".join(re.findall(r"^\w+|\d+\.\d+", name)[:2])


def software(runs: Sequence[Record]) -> dict[str, str]:
    """Versions of Python and the packages that results depend on, of the newest record that names all."""
    newest = max(runs, key=lambda run: (len(run.provenance.packages), run.provenance.start)).provenance
    return {"Python": newest.python, **newest.packages}


def commits(runs: Sequence[Record]) -> dict[str, int]:
    """Short commits that made the records, and how many each."""
    return dict(Counter(run.provenance.git_commit[:7] for run in runs if run.provenance.git_commit).most_common())


def inputs() -> tuple[int, float]:
    """How many input files are shipped, and their megabytes."""
    folders = [paths.root() / name for name in ("data", "src/repro/scaling/data")]
    files = [
        folder / line.split(maxsplit=1)[1].lstrip("*")
        for folder in folders
        for line in (folder / "checksums.txt").read_text().splitlines()
    ]
    return len(files), sum(file.stat().st_size for file in files) / 1e6


def megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
