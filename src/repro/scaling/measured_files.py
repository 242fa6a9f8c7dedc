"""Reads a user's own measurements: output of nccl-tests, rccl-tests or the OSU micro-benchmarks, or a CSV table.

All functions return the table of `measured`. Benchmarks count bytes differently; each function says what its benchmark
means, as found in the source. A file holds one run. Lines that libraries or launchers print in between are skipped.
ValueErrors name the file and the line.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pandas as pd

from repro.scaling.measured import COLLECTIVES, tidy

__all__ = ["nccl_tests", "osu", "read"]

_PROGRAMS = {
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "reduce_scatter",
    "all_reduce_perf": "all_reduce",
    "alltoall_perf": "all_to_all",
    "sendrecv_perf": "send_recv",
}
_OSU_TITLES = {
    "Allgather Latency Test": "all_gather",
    "Reduce_scatter Latency Test": "reduce_scatter",
    "Allreduce Latency Test": "all_reduce",
    "All-to-All Personalized Exchange Latency Test": "all_to_all",
    "Latency Test": "send_recv",  # osu_latency
}


def read(
    path: str | Path,
    collective: str | None = None,
    *,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    source: str | None = None,
) -> pd.DataFrame:
    """The table of a file of any known format: nccl-tests or rccl-tests, OSU, or a CSV with the columns
    `measured.COLUMNS`.

    Arguments are those of `nccl_tests` and `osu`. A CSV has them as columns and takes none. ValueError for other
    formats, and as those functions say.
    """
    lines = _lines(path)
    if any(line.startswith("# OSU ") for line in lines):
        if nodes is None or ranks_per_node is None:
            raise ValueError(f"{path}: OSU benchmarks do not print where ranks ran: give nodes and ranks_per_node")
        table = osu(path, nodes=nodes, ranks_per_node=ranks_per_node, source=source)
        if collective not in (None, *table["collective"]):
            raise ValueError(f"{path}: collective is {collective!r}, but the file is of {table['collective'][0]}")
        return table
    if any(_is_nccl_header(line) for line in lines):
        return nccl_tests(path, collective, nodes=nodes, ranks_per_node=ranks_per_node, source=source)
    first = next((line for line in lines if line), "")
    if "collective" not in first.split(","):
        raise ValueError(
            f"{path}: begins with {first[:60]!r}; allowed is the output of nccl-tests or rccl-tests (it has a line "
            "'#  size  count  type ...'), of OSU (a line '# OSU ... Latency Test'), or a CSV with a header line"
        )
    if any(argument is not None for argument in (collective, nodes, ranks_per_node, source)):
        raise ValueError(f"{path}: a CSV names collective, nodes, ranks_per_node and source itself: leave them out")
    try:
        return tidy(pd.read_csv(path, skipinitialspace=True, encoding="utf-8-sig"), str(path))
    except pd.errors.ParserError as error:  # tells the line, not the file
        raise ValueError(f"{path}: {error}") from None


def nccl_tests(
    path: str | Path,
    collective: str | None = None,
    *,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    source: str | None = None,
) -> pd.DataFrame:
    """Out-of-place times from the output of an nccl-tests or rccl-tests program, as printed since 2019 (checked up to
    2.19).

    collective              needed where the file names no program (nccl-tests prints its own name since mid-2025)
    nodes, ranks_per_node   override the list of ranks at the top of the file, where each host counts as a node
    source                  the table's `source`; default: the file's name

    Found in nccl-tests' source: `size` is the larger of a rank's send and receive buffer: the output of all_gather, the
    input of reduce_scatter, the tensor of all_reduce, the send buffer of all_to_all. So it is our `nbytes`. It is what
    was moved, rounded down to a multiple of the ranks. sendrecv is a ring: every rank sends `size` to the next and
    receives as much. Time is the mean over iterations launched back to back, and over ranks (option -a). Rows of 0
    bytes, to which small sizes on many ranks are rounded, are left out: nothing ran.

    ValueError where the collective or the ranks are unknown, hosts have different numbers of ranks, only in-place or
    CPU times were measured, a result was wrong, or a line is cut off.
    """
    lines = _lines(path)
    collective = _collective_of(lines, path, collective)
    nodes, ranks_per_node = _places(lines, path, nodes, ranks_per_node)
    start, header = _only(lines, _is_nccl_header, path, "column header '#  size  count  type ...'")
    names = header.lstrip("# ").split()
    if names.count("time") != 2:
        found = f"columns are {' '.join(names)}"
        raise ValueError(f"{path}, line {start}: {found}; needed are two of 'time': out-of-place, then in-place")
    time, rows = names.index("time"), []
    for number, words in _rows(lines, start):
        if len(words) < len(names):
            found = f"{len(words)} columns, the header has {len(names)}"
            raise ValueError(f"{path}, line {number}: {found}: {' '.join(words)}")
        wrong = words[time + 3] if names[time + 3] == "#wrong" else "0"
        if wrong not in ("0", "N/A"):
            raise ValueError(f"{path}, line {number}: #wrong is {wrong}, allowed is 0: the time of a wrong result")
        if int(words[0]) > 0:
            rows.append((int(words[0]), _microseconds(words[time], path, number)))
    return _table(rows, path, collective, nodes, ranks_per_node, source)


def osu(path: str | Path, *, nodes: int, ranks_per_node: int, source: str | None = None) -> pd.DataFrame:
    """Output of `osu_allgather`, `osu_reduce_scatter`, `osu_allreduce`, `osu_alltoall` or `osu_latency`, with or
    without `-f`.

    Found in OSU's source (5.3, and reduce_scatter of 2022): `Size` is one rank's contribution in allgather and what
    goes to one peer in alltoall, so there `nbytes` is `Size` times the ranks. It is the whole input in reduce_scatter
    and the tensor in allreduce. Time is the mean over iterations, each after a barrier, and over ranks. That of
    osu_latency is half a round trip between 2 ranks: our send_recv.

    ValueError for another benchmark (non-blocking, bandwidth, vector), a failed validation, and osu_latency not on 2
    ranks.
    """
    _refuse_fewer_than_one(path, nodes, ranks_per_node)
    lines = _lines(path)
    number, title = _only(lines, lambda line: line.startswith("# OSU "), path, "title '# OSU ... Latency Test'")
    name = " ".join(title.split()[3:]).partition(" v")[0]  # of "# OSU MPI-ROCM Allgather Latency Test v5.9"
    if name not in _OSU_TITLES:
        raise ValueError(f"{path}, line {number}: test is {name!r}, allowed is one of {', '.join(_OSU_TITLES)}")
    collective, ranks = _OSU_TITLES[name], nodes * ranks_per_node
    if collective == "send_recv" and ranks != 2:
        raise ValueError(f"{path}: nodes x ranks_per_node is {nodes} x {ranks_per_node}; osu_latency runs on 2 ranks")
    factor = ranks if collective in ("all_gather", "all_to_all") else 1
    start, _ = _only(
        lines, lambda line: line.startswith("# Size") and "Latency" in line, path, "header '# Size ... Latency'"
    )
    rows = []
    for number, words in _rows(lines, start):
        if len(words) < 2 or "Fail" in words:
            found = " ".join(words)
            raise ValueError(f"{path}, line {number}: found {found!r}, needed a size and a time of a correct result")
        rows.append((int(words[0]) * factor, _microseconds(words[1], path, number)))
    return _table(rows, path, collective, nodes, ranks_per_node, source)


def _collective_of(lines: list[str], path: str | Path, given: str | None) -> str:
    """The collective whose program the file names, or the `given` one. ValueError where they differ or are missing."""
    if given not in (None, *COLLECTIVES):
        raise ValueError(f"{path}: collective is {given!r}, allowed is one of {', '.join(COLLECTIVES)}")
    named = {collective for program, collective in _PROGRAMS.items() if any(program in line for line in lines)}
    if given is not None:
        if named and given not in named:
            raise ValueError(f"{path}: collective is {given!r}, but the file names {', '.join(sorted(named))}")
        return given
    if len(named) != 1:
        found = ", ".join(sorted(named)) or "none"
        raise ValueError(f"{path}: its collective cannot be told ({found} named in it): give collective")
    return named.pop()


def _places(lines: list[str], path: str | Path, nodes: int | None, per_node: int | None) -> tuple[int, int]:
    """Nodes and ranks per node: as given, else from the lines `#  Rank  0 Group  0 Pid 43 on HOST device  0 ...`."""
    _refuse_fewer_than_one(path, nodes, per_node)
    if nodes is not None and per_node is not None:
        return nodes, per_node
    help_ = "give nodes and ranks_per_node"
    listed = [line.lstrip("# ").split() for line in lines if line.startswith("#")]
    listed = [words for words in listed if words[:1] == ["Rank"] and "on" in words]
    if not listed:
        raise ValueError(f"{path}: no lines '#  Rank ... on HOST device ...': {help_}")
    if sorted(int(words[1]) for words in listed) != list(range(len(listed))):
        # Without MPI every process is rank 0 and measures itself alone.
        last = len(listed) - 1
        raise ValueError(f"{path}: the list of ranks is not 0 to {last}, each once; if it is only cut short, {help_}")
    if len({words[3] for words in listed if words[2] == "Group"}) > 1:
        raise ValueError(f"{path}: ranks are split into groups that run side by side: {help_} of one group")
    hosts = Counter(words[words.index("on") + 1] for words in listed)
    if nodes is None and per_node is None and len(set(hosts.values())) > 1:
        counts = ", ".join(f"{count} on {host}" for host, count in hosts.items())
        raise ValueError(f"{path}: ranks are uneven ({counts}), allowed is the same number on each node; else {help_}")
    nodes = nodes or (len(listed) // per_node if per_node else len(hosts))
    per_node = per_node or len(listed) // nodes
    if nodes * per_node != len(listed):
        raise ValueError(f"{path}: {len(listed)} ranks do not make {nodes} x {per_node}: {help_}")
    return nodes, per_node


def _refuse_fewer_than_one(path: str | Path, nodes: int | None, per_node: int | None) -> None:
    for name, value in (("nodes", nodes), ("ranks_per_node", per_node)):
        if value is not None and value < 1:
            raise ValueError(f"{path}: {name} is {value}, must be at least 1")


def _lines(path: str | Path) -> list[str]:
    """Lines without surrounding blanks. Job logs may hold bytes of any encoding."""
    return [line.strip() for line in Path(path).read_text(encoding="utf-8-sig", errors="replace").splitlines()]


def _is_nccl_header(line: str) -> bool:
    return line.startswith("#") and line.lstrip("# ").split()[:3] == ["size", "count", "type"]


def _only(lines: list[str], wanted: Callable[[str], bool], path: str | Path, what: str) -> tuple[int, str]:
    """Number (from 1) and text of the one line that is `wanted`. ValueError for none or several."""
    found = [(number, line) for number, line in enumerate(lines, 1) if wanted(line)]
    if len(found) != 1:
        where = ", ".join(str(number) for number, _ in found) or "none"
        raise ValueError(f"{path}: one line is allowed to be a {what}, found {where}; put each run into its own file")
    return found[0]


def _rows(lines: list[str], header: int) -> Iterator[tuple[int, list[str]]]:
    """Number and words of each line after the `header` that begins with a whole number; others hold no result."""
    for number, line in enumerate(lines[header:], header + 1):
        words = line.split()
        if words and words[0].isdecimal():
            yield number, words


def _microseconds(word: str, path: str | Path, number: int) -> float:
    """The time `word`, in microseconds, as seconds."""
    try:
        return float(word) * 1e-6
    except ValueError:
        raise ValueError(f"{path}, line {number}: time is {word!r}, allowed is a number of microseconds") from None


def _table(
    rows: Sequence[tuple[int, float]], path: str | Path, collective: str, nodes: int, per_node: int, source: str | None
) -> pd.DataFrame:
    """The table of one run, from its (nbytes, seconds)."""
    if not rows:
        raise ValueError(f"{path}: no line of results after the column header; was the run cut off?")
    table = pd.DataFrame(rows, columns=["nbytes", "seconds"])
    told = {"source": source or Path(path).name, "collective": collective, "algorithm": ""}
    return tidy(table.assign(**told, nodes=nodes, ranks_per_node=per_node), str(path))
