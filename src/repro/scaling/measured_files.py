"""Reads a user's own measurements: output of nccl-tests, rccl-tests or the OSU micro-benchmarks, a CSV table, or what
`fabric_probe` recorded.

A file holds one run. Lines that libraries or launchers print in between are skipped. Benchmarks count bytes
differently; found in their sources:

nccl-tests and rccl-tests, as printed since 2019 (checked up to 2.19): `size` is the larger of a rank's send and receive
buffer, so it is our `nbytes`. Time is the mean over iterations launched back to back, and over ranks (option -a); we
take the out-of-place one.

OSU (5.3, and reduce_scatter of 2022): `Size` is one rank's contribution in allgather and what goes to one peer in
alltoall, so there `nbytes` is `Size` times the ranks. It is the whole input in reduce_scatter and the tensor in
allreduce. Time is the mean over iterations, each after a barrier, and over ranks. osu_latency is our send_recv.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from repro.scaling.measured import tidy

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
_NCCL_HEADER = re.compile(r"#[# ]*size\s+count\s+type\b")
_NCCL_RANK = re.compile(r"#[# ]*Rank\s+(\d+)(?:\s+Group\s+(\d+))?.*?\son\s+(\S+)")
_OSU_TITLE = re.compile(r"# OSU \S+ (.+?)( v\S*)?$")  # "# OSU MPI-ROCM Allgather Latency Test v5.9"
_OSU_HEADER = re.compile(r"# Size.*Latency")

Rows = list[tuple[int, float]]  # nbytes and seconds


def read(
    path: str | Path,
    collective: str | None = None,
    *,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    source: str | None = None,
) -> pd.DataFrame:
    """The table of `measured` from a file of any known format. A CSV has all columns and takes no arguments.

    collective              needed where the file names no program (nccl-tests prints its own name since mid-2025)
    nodes, ranks_per_node   needed for OSU. For nccl-tests they override the list of ranks at the top of the file, where
                            each host counts as a node
    source                  the table's `source`; default: the file's name

    ValueError, which names the file and the line, for other formats and benchmarks (non-blocking, bandwidth, vector),
    several runs in a file, wrong results, lines that are cut off, and places of ranks that are missing or uneven.
    """
    try:
        return tidy(_table(Path(path), collective, nodes, ranks_per_node, source))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_probe(path: str | Path) -> pd.DataFrame:
    """The table that `repro run fabric_probe` left, for `repro.scaling.fit`: a row per collective, group and size, with
    `sizes` of the levels package, node and cluster, and `hop`, the levels that a group spans.

    path   of the record (JSON); its series lies beside it

    ValueError, which names the file, where it is no finished record of `fabric_probe`.
    """
    try:
        record = json.loads(Path(path).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path}: a {type(record).__name__}, allowed is the record of an experiment")
    if record.get("experiment") != "fabric_probe" or record.get("status") != "ok":
        found = f"{record.get('experiment')!r} with status {record.get('status')!r}"
        raise ValueError(f"{path}: experiment is {found}, allowed is 'fabric_probe' with status 'ok'")
    series = pd.read_parquet(Path(path).with_name(record["series"]))
    sizes = tuple(record["point"][name] for name in ("gcds", "packages", "nodes"))
    return series.assign(sizes=[sizes] * len(series), hop=[tuple(hop.split("+")) for hop in series.hop])


def _table(
    path: Path, collective: str | None, nodes: int | None, per_node: int | None, source: str | None
) -> pd.DataFrame:
    for name, value in (("nodes", nodes), ("ranks_per_node", per_node)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
    lines = [line.strip() for line in path.read_text(encoding="utf-8-sig", errors="replace").splitlines()]
    if any(map(_OSU_TITLE.match, lines)):
        if nodes is None or per_node is None:
            raise ValueError("OSU benchmarks do not print where ranks ran: give nodes and ranks_per_node")
        named, rows = _osu(lines, nodes, per_node)
    elif any(map(_NCCL_HEADER.match, lines)):
        nodes, per_node = _places(lines, nodes, per_node)
        named, rows = _nccl(lines)
    else:
        first = next(filter(None, lines), "")
        if "collective" not in first.split(","):
            raise ValueError(
                f"begins with {first[:60]!r}; allowed is the output of nccl-tests or rccl-tests (it has a line "
                "'#  size  count  type ...'), of OSU (a line '# OSU ... Latency Test'), or a CSV with a header line"
            )
        if any(argument is not None for argument in (collective, nodes, per_node, source)):
            raise ValueError("a CSV names collective, nodes, ranks_per_node and source itself: leave them out")
        return pd.read_csv(path, skipinitialspace=True, encoding="utf-8-sig")
    if collective and named and collective not in named:
        raise ValueError(f"collective is {collective!r}, but the file names {', '.join(sorted(named))}")
    if not collective and len(named) != 1:
        told = ", ".join(sorted(named)) or "none"
        raise ValueError(f"its collective cannot be told ({told} named in it): give collective")
    if not rows:
        raise ValueError("no line of results after the column header; was the run cut off?")
    return pd.DataFrame(rows, columns=["nbytes", "seconds"]).assign(
        source=source or path.name,
        collective=collective or named.pop(),
        algorithm="",
        nodes=nodes,
        ranks_per_node=per_node,
    )


def _nccl(lines: list[str]) -> tuple[set[str], Rows]:
    """The collectives that the file names, and the rows."""
    start, header = _only(lines, _NCCL_HEADER, "column header '#  size  count  type ...'")
    names = header.lstrip("# ").split()
    if names.count("time") != 2:
        found = f"columns are {' '.join(names)}"
        raise ValueError(f"line {start}: {found}; needed are two of 'time': out-of-place, then in-place")
    time, rows = names.index("time"), []
    for number, words in _results(lines, start):
        if len(words) < len(names):
            raise ValueError(f"line {number}: {len(words)} columns, the header has {len(names)}: {' '.join(words)}")
        wrong = words[time + 3] if names[time + 3] == "#wrong" else "0"
        if wrong not in ("0", "N/A"):
            raise ValueError(f"line {number}: #wrong is {wrong}, allowed is 0: the time of a wrong result")
        if int(words[0]) > 0:  # nothing runs for 0 bytes
            rows.append((int(words[0]), _seconds(words[time], number)))
    return {kind for program, kind in _PROGRAMS.items() if any(program in line for line in lines)}, rows


def _osu(lines: list[str], nodes: int, per_node: int) -> tuple[set[str], Rows]:
    """The same of an OSU benchmark on so many nodes and ranks per node."""
    number, title = _only(lines, _OSU_TITLE, "title '# OSU ... Latency Test'")
    name = _OSU_TITLE.sub(r"\1", title)
    if name not in _OSU_TITLES:
        raise ValueError(f"line {number}: test is {name!r}, allowed is one of {', '.join(_OSU_TITLES)}")
    collective, ranks = _OSU_TITLES[name], nodes * per_node
    if collective == "send_recv" and ranks != 2:
        raise ValueError(f"nodes x ranks_per_node is {nodes} x {per_node}; osu_latency runs on 2 ranks")
    factor = ranks if collective in ("all_gather", "all_to_all") else 1
    start, _ = _only(lines, _OSU_HEADER, "header '# Size ... Latency'")
    rows = []
    for number, words in _results(lines, start):
        if len(words) < 2 or "Fail" in words:
            found = " ".join(words)
            raise ValueError(f"line {number}: found {found!r}, needed a size and a time of a correct result")
        rows.append((int(words[0]) * factor, _seconds(words[1], number)))
    return {collective}, rows


def _places(lines: list[str], nodes: int | None, per_node: int | None) -> tuple[int, int]:
    """Nodes and ranks per node: as given, else from the lines `#  Rank  0 Group  0 Pid 43 on HOST device  0 ...`."""
    if nodes is not None and per_node is not None:
        return nodes, per_node
    help_ = "give nodes and ranks_per_node"
    listed = [found.groups() for found in map(_NCCL_RANK.match, lines) if found]
    if not listed:
        raise ValueError(f"no lines '#  Rank ... on HOST device ...': {help_}")
    if sorted(int(rank) for rank, _, _ in listed) != list(range(len(listed))):
        # Without MPI every process is rank 0 and measures itself alone.
        last = len(listed) - 1
        raise ValueError(f"the list of ranks is not 0 to {last}, each once; if it is only cut short, {help_}")
    if len({group for _, group, _ in listed if group}) > 1:
        raise ValueError(f"ranks are split into groups that run side by side: {help_} of one group")
    hosts = Counter(host for _, _, host in listed)
    if nodes is None and per_node is None and len(set(hosts.values())) > 1:
        counts = ", ".join(f"{count} on {host}" for host, count in hosts.items())
        raise ValueError(f"ranks are uneven ({counts}), allowed is the same number on each node; else {help_}")
    nodes = nodes or (len(listed) // per_node if per_node else len(hosts))
    per_node = per_node or len(listed) // nodes
    if nodes * per_node != len(listed):
        raise ValueError(f"{len(listed)} ranks do not make {nodes} x {per_node}: {help_}")
    return nodes, per_node


def _only(lines: list[str], wanted: re.Pattern[str], what: str) -> tuple[int, str]:
    """Number (from 1) and text of the one line that matches. ValueError for none or several."""
    found = [(number, line) for number, line in enumerate(lines, 1) if wanted.match(line)]
    if len(found) != 1:
        where = ", ".join(str(number) for number, _ in found) or "none"
        raise ValueError(f"one line is allowed to be a {what}, found {where}; put each run into its own file")
    return found[0]


def _results(lines: list[str], header: int) -> Iterator[tuple[int, list[str]]]:
    """Number and words of each line after the `header` that begins with a whole number; others hold no result."""
    for number, line in enumerate(lines[header:], header + 1):
        words = line.split()
        if words and words[0].isdecimal():
            yield number, words


def _seconds(microseconds: str, number: int) -> float:
    try:
        return float(microseconds) * 1e-6
    except ValueError:
        raise ValueError(f"line {number}: time is {microseconds!r}, allowed is a number of microseconds") from None
