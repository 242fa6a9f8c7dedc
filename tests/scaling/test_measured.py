"""Measured times of collectives: the shipped tables against their raw files, and outputs of benchmarks, old and new."""

import csv
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import repro
from repro.scaling import measured, measured_files

HEADER = """\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
"""


def ranks(hosts: dict[str, int], group: str = " Group  0") -> str:
    """The list of devices at the top of a file: `hosts` with the ranks on each."""
    places = [(host, device) for host, count in hosts.items() for device in range(count)]
    return "# Using devices\n" + "".join(
        f"#  Rank {rank:2d}{group} Pid {4000 + rank:6d} on {host:>10s} device {device:2d} [0000:1b:00] NVIDIA H100\n"
        for rank, (host, device) in enumerate(places)
    )


NCCL = (
    """\
mpirun: Authorization required, but no authorization protocol specified
# nccl-tests version 2.18.5 nccl-headers=22809 nccl-library=22809
# Collective test starting: all_gather_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 2147483648 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0
#
"""
    + ranks({"cnode2-001": 8, "cnode2-002": 8})
    + "#\n"
    + HEADER
    + """\
           0             0     float    none      -1     0.13    0.00    0.00       0     0.13    0.00    0.00       0
cnode2-001:4000:4011 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
     1048576         16384     float    none      -1    52.41   20.01   18.76       0    51.02   20.55   19.27     N/A
  2147483648      33554432     float    none      -1  12345.6  173.95  163.08       0  12346.7  173.93  163.06       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 90.9611
#
# Collective test concluded: all_gather_perf
"""
)

# 2019 to 2022: no redop in all_gather, alltoall and sendrecv without root, a tolerance "error" instead of "#wrong".
NCCL_OLD = """\
# nThread 1 nGpus 2 minBytes 1048576 maxBytes 2097152 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
#   Rank  0 Pid 2916721 on      a0000 device  0 [0x27] NVIDIA A100-SXM4-40GB
#   Rank  1 Pid 2916721 on      a0000 device  1 [0x2a] NVIDIA A100-SXM4-40GB
#
#                                                     out-of-place                       in-place
#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)             (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        131072   float    18.30   57.30   28.65  0e+00    18.11   57.90   28.95  0e+00
     2097152        262144   float    25.70   81.60   40.80  0e+00    25.60   81.92   40.96  0e+00
# Out of bounds values : 0 OK
"""

RCCL = (
    """\
# Collective test starting: alltoall_perf
# nThread 1 nGpus 4 minBytes 33554432 maxBytes 33554432 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
rccl-tests: Version develop:ae3e635
"""
    + ranks({"GPU-6403": 4}, group="")
    + "RCCL version : 2.27.7-develop:29e1567\n8x\n#\n"
    + HEADER
    + "    33554432       2097152     float    none      -1    401.5   83.57   62.68      0    399.1   84.07   63.06    N/A\n"
)

OSU = """\

# OSU MPI-ROCM Allgather Latency Test v5.9
# Size       Avg Latency(us)
1                       2.81
[a100-01.cluster:mpi_rank_0][dreg_register] [Performance Impact Warning]: Entries are being evicted
1048576               104.30
"""
OSU_FULL = """\
# OSU MPI All-to-All Personalized Exchange Latency Test v7.4
# Datatype: MPI_CHAR.
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
1                       2.81              1.89              3.73        1000
65536                 104.30            104.26            104.34         100
"""


@pytest.fixture
def saved(tmp_path):
    def save(text: str):
        path = tmp_path / "output.txt"
        path.write_text(text)
        return path

    return save


def raw(name: str) -> list[dict[str, str]]:
    with (Path(measured.__file__).parent / "data" / name).open() as file:
        return list(csv.DictReader(file))


def test_shipped_tables_are_part_of_the_package(tmp_path):
    """They are found outside any checkout."""
    shutil.copytree(Path(repro.__file__).parent, tmp_path / "site/repro")
    tables = "measured.a100_dgx(), measured.slingshot11(), measured.blink('lumi')"
    program = f"from repro.scaling import measured; print(*map(len, ({tables})))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.split() == ["8946", "816", "259"], done.stderr


BLINK = [(partial(measured.blink, system), rows) for system, rows in (("alps", 417), ("leonardo", 336), ("lumi", 259))]


@pytest.mark.parametrize(("table", "rows"), [(measured.a100_dgx, 8946), (measured.slingshot11, 816), *BLINK])
def test_shipped_tables_have_the_one_schema(table, rows):
    found = table()
    assert tuple(found.columns) == measured.COLUMNS and len(found) == rows
    assert not found.isna().any().any() and list(found.index) == list(range(rows))
    assert found["source"].nunique() == 1 and set(found["collective"]) <= set(measured.COLLECTIVES)
    assert [found[name].dtype.kind for name in ("nodes", "ranks_per_node", "nbytes", "seconds")] == ["i", "i", "i", "f"]


def test_a100_dgx_is_its_files():
    found = measured.a100_dgx()
    shapes = found.groupby(["collective", "nodes", "ranks_per_node"]).size().to_dict()
    reduced = [(2, 1), (1, 2), (2, 2), (1, 4), (2, 4), (1, 8), (2, 8)]
    assert shapes == {("all_reduce", *shape): 994 for shape in reduced} | {("send_recv", *s): 994 for s in reduced[:2]}
    for collective in ("all_reduce", "send_recv"):
        lines = raw(f"vidur_net_a100_dgx_{collective}.csv")
        here = found[found["collective"] == collective].reset_index()
        for row in (0, 500, len(lines) - 1):
            assert here["nbytes"][row] == int(lines[row]["size"])
            assert here["seconds"][row] == pytest.approx(float(lines[row][f"time_stats.{collective}.median"]) / 1e3)
            assert here["nodes"][row] * here["ranks_per_node"][row] == int(lines[row]["num_workers"])


def test_a100_dgx_sizes_are_bytes():
    """As 2-byte elements, they would be sent faster than the 300 GB/s that NVLink 3 carries in one direction."""
    found = measured.a100_dgx()
    sent = found[(found["collective"] == "send_recv") & (found["nodes"] == 1)]
    fastest = (sent["nbytes"] / sent["seconds"]).max()
    assert 150e9 < fastest < 300e9 < 2 * fastest


def test_slingshot11_is_its_file():
    found = measured.slingshot11()
    lines = [line for line in raw("pico_lumi_slingshot11_cpu_collectives.csv") if line["collective"] != "REDUCE"]
    assert [line["algorithm"] for line in lines] == found["algorithm"].tolist()
    assert [line["collective"].lower().replace("all", "all_") for line in lines] == found["collective"].tolist()
    np.testing.assert_allclose([float(line["median_us"]) * 1e-6 for line in lines], found["seconds"])
    named = {(line["nodes"], line["tasks_per_node"]) for line in lines}
    assert {(str(a), str(b)) for a, b in zip(found["nodes"], found["ranks_per_node"], strict=True)} == named


def test_slingshot11_counts_what_was_moved():
    """Whole shares of int32 for the collectives that have shares; nominal sizes, powers of two, for all_reduce."""
    found = measured.slingshot11()
    lines = [line for line in raw("pico_lumi_slingshot11_cpu_collectives.csv") if line["collective"] != "REDUCE"]
    nominal = np.array([int(line["total_bytes"]) for line in lines])
    world = found["nodes"] * found["ranks_per_node"]
    shared = found["collective"] != "all_reduce"
    assert (found["nbytes"] == nominal)[~shared | (found["nodes"] == 16)].all()
    assert (found["nbytes"] % (4 * world) == 0)[shared].all()
    assert (found["nbytes"] <= nominal).all() and (found["nbytes"] > nominal - 4 * world).all()


def test_slingshot11_sizes_are_whole_tensors():
    """As one rank's contribution, the largest all_gather would pass several times the 25 GB/s of a node's NIC."""
    found = measured.slingshot11()
    alone = found[(found["collective"] == "all_gather") & (found["ranks_per_node"] == 1) & (found["nbytes"] > 5e8)]
    received = (alone["nbytes"] * (1 - 1 / alone["nodes"]) / alone["seconds"]).max()
    assert 5e9 < received < 25e9 < 16 * received


@pytest.mark.parametrize("system", ["alps", "leonardo", "lumi"])
def test_blink_is_its_file_without_what_its_docstring_leaves_out(system):
    slow = {
        "alps": lambda line: int(line["nodes"]) == 2 and line["run"] < "2024-03-25T20",
        "leonardo": lambda line: line["setting"].startswith("SL0"),
        "lumi": lambda line: line["run"] < "2024-03-26T16",
    }[system]
    mine = [line for line in raw("blink_gpu_collectives.csv") if line["system"] == system]
    kept = [line for line in mine if not slow(line)]
    found = measured.blink(system)
    assert 0 < len(kept) < len(mine)
    assert found["seconds"].tolist() == pytest.approx([float(line["median_us"]) * 1e-6 for line in kept])
    assert found["nodes"].tolist() == [int(line["nodes"]) for line in kept]
    assert min(int(line["iterations"]) for line in kept) == 100


def test_between_nodes_of_lumi_a_byte_takes_no_longer_than_its_way():
    found = measured.blink("lumi").query("nodes > 1 and collective == 'all_reduce' and nbytes == 1")
    assert set(found["nodes"]) == {2, 4, 8, 16, 32, 33, 62, 64} and found["seconds"].max() < 0.2e-3
    with pytest.raises(ValueError, match="system 'frontier' has no measured times, known: alps, leonardo, lumi"):
        measured.blink("frontier")


@pytest.mark.parametrize(("system", "nic"), [("alps", 25e9), ("leonardo", 12.5e9), ("lumi", 25e9)])
def test_blink_sizes_are_whole_tensors(system, nic):
    """As what goes to one other rank, an all-to-all among many nodes nearly fills the four NICs of a node, and no more."""
    found = measured.blink(system)
    sent = found[(found["collective"] == "all_to_all") & (found["nodes"] > 2)]
    leaving = sent["nbytes"] * sent["ranks_per_node"] * (1 - 1 / sent["nodes"]) / 4
    assert 0.6 * nic < (leaving / sent["seconds"]).max() < 1.05 * nic


def test_nccl_tests_today(saved):
    found = measured_files.read(saved(NCCL))
    assert tuple(found.columns) == measured.COLUMNS
    assert found["nbytes"].tolist() == [1048576, 2147483648]  # `size` is the gathered output; nothing ran for 0 bytes
    assert found["seconds"].tolist() == pytest.approx([52.41e-6, 12345.6e-6])  # out of place
    assert set(zip(found["collective"], found["nodes"], found["ranks_per_node"], strict=True)) == {("all_gather", 2, 8)}
    assert set(found["source"]) == {"output.txt"} and set(found["algorithm"]) == {""}


def test_nccl_tests_before_columns_were_the_same_for_all(saved):
    found = measured_files.read(saved(NCCL_OLD), "all_gather", source="a machine")
    assert found["seconds"].tolist() == pytest.approx([18.30e-6, 25.70e-6]) and found["nbytes"][0] == 1048576
    assert found.iloc[0][["source", "nodes", "ranks_per_node"]].tolist() == ["a machine", 1, 2]
    with_operation = NCCL_OLD.replace(" type ", " type  redop ").replace(" float ", " float  sum ")
    assert measured_files.read(saved(with_operation), "reduce_scatter")["seconds"].equals(found["seconds"])


def test_nccl_tests_with_columns_of_options(saved):
    """-I adds four columns behind each part, -S a time of day of two words."""
    text = NCCL.replace("#wrong ", "#wrong  i_min  i_max  i_p99  i_cv% ").replace("#wrong\n", "#wrong  timestamp\n")
    text = text.replace("       0     0.13", "       0 1 2 2 3  0.13").replace(
        "       0    51.02", "       0 1 2 2 3  51.02"
    )
    text = text.replace("       0  12346.7", "       0 1 2 2 3 12346.7")
    text = text.replace("N/A\n", "N/A  2025-10-28 12:00:00\n").replace("   0\n", "   0  2025-10-28 12:00:00\n")
    assert measured_files.read(saved(text))["seconds"].tolist() == pytest.approx([52.41e-6, 12345.6e-6])


def test_rccl_tests(saved):
    found = measured_files.read(saved(RCCL))
    assert found.iloc[0].tolist() == ["output.txt", "all_to_all", "", 1, 4, 33554432, pytest.approx(401.5e-6)]
    split = measured_files.read(saved(RCCL), nodes=2)  # two containers of one name, say
    assert (split["nodes"][0], split["ranks_per_node"][0]) == (2, 2)


@pytest.mark.parametrize(
    ("title", "collective", "nbytes"),
    [
        ("Allgather", "all_gather", 6 * 1048576),
        ("All-to-All Personalized Exchange", "all_to_all", 6 * 1048576),
        ("Reduce_scatter", "reduce_scatter", 1048576),
        ("Allreduce", "all_reduce", 1048576),
    ],
)
def test_osu_sizes_become_those_of_the_whole_tensor(saved, title, collective, nbytes):
    found = measured_files.read(saved(OSU.replace("Allgather", title)), nodes=2, ranks_per_node=3)
    assert found.iloc[1].tolist() == ["output.txt", collective, "", 2, 3, nbytes, pytest.approx(104.30e-6)]


def test_osu_with_statistics(saved):
    found = measured_files.read(saved(OSU_FULL), nodes=2, ranks_per_node=4, source="box")
    assert found.iloc[1].tolist() == ["box", "all_to_all", "", 2, 4, 8 * 65536, pytest.approx(104.30e-6)]
    validated = "\n".join(line + ("  Pass" if line[:1].isdigit() else "") for line in OSU_FULL.splitlines())
    assert measured_files.read(saved(validated), nodes=2, ranks_per_node=4)["seconds"].equals(found["seconds"])


def test_osu_latency_is_one_message(saved):
    text = "# OSU MPI-CUDA Latency Test v7.0\n# Send Buffer on DEVICE (D) and Receive Buffer on DEVICE (D)\n"
    text += "# Size          Latency (us)\n0                       1.50\n8                       1.62\n"
    found = measured_files.read(saved(text), nodes=2, ranks_per_node=1)
    assert found["collective"].tolist() == ["send_recv"] * 2 and found["nbytes"].tolist() == [0, 8]


def test_read_tells_formats_apart(saved, tmp_path):
    assert measured_files.read(saved(NCCL))["collective"][0] == "all_gather"
    assert measured_files.read(saved(NCCL_OLD), "send_recv")["collective"][0] == "send_recv"
    assert measured_files.read(saved(OSU), "all_gather", nodes=1, ranks_per_node=2)["nbytes"][0] == 2
    for table in (measured.slingshot11(), measured.a100_dgx().head(20)):  # with algorithms, and without any
        path = tmp_path / "own.csv"
        table.assign(note="x").to_csv(path, index=False)
        again = measured_files.read(path)
        assert again.drop(columns="seconds").equals(table.drop(columns="seconds"))
        np.testing.assert_allclose(again["seconds"], table["seconds"], rtol=1e-12)


@pytest.mark.parametrize(("experiment", "status"), [("zero_train", "ok"), ("fabric_probe", "failed")])
def test_what_is_no_record_of_a_probe_is_refused(saved, experiment, status):
    path = saved(json.dumps({"experiment": experiment, "status": status, "series": None}))
    with pytest.raises(
        ValueError, match=f"output.txt: experiment is '{experiment}' with status '{status}', allowed is"
    ):
        measured_files.read_probe(path)
    with pytest.raises(ValueError, match=r"output.txt: not JSON"):
        measured_files.read_probe(saved(NCCL))
    with pytest.raises(ValueError, match=r"output.txt: a list, allowed is the record"):
        measured_files.read_probe(saved("[]"))


CSV = "source,collective,algorithm,nodes,ranks_per_node,nbytes,seconds\nbox,all_gather,,2,8,1024,1e-5\n"
OLD_NO_RANKS = "\n".join(line for line in NCCL_OLD.splitlines() if "Rank" not in line)


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (NCCL_OLD, {}, r"output.txt: its collective cannot be told \(none named in it\): give collective"),
        (NCCL_OLD, {"collective": "allgather"}, "'allgather', allowed is one of all_gather, reduce_scatter"),
        (NCCL, {"collective": "all_reduce"}, "collective is 'all_reduce', but the file names all_gather"),
        (OLD_NO_RANKS, {"collective": "all_reduce"}, "no lines '#  Rank .*give nodes and ranks_per_node"),
        (NCCL.replace("Rank  1", "Rank  0"), {}, "list of ranks is not 0 to 15, each once"),
        (NCCL.replace("Rank  1 Group  0", "Rank  1 Group  1"), {}, "split into groups"),
        (NCCL.replace("on cnode2-001 device  7", "on cnode2-002 device  8"), {}, "7 on cnode2-001, 9 on cnode2-002"),
        (NCCL, {"nodes": 3}, "16 ranks do not make 3 x 5"),
        (NCCL.replace(" time ", " cputime "), {}, "line 25: columns are .*cputime.*needed are two of 'time'"),
        (NCCL[: NCCL.index("  163.08")], {}, "line 30: 7 columns, the header has 13"),
        (NCCL.replace("18.76       0", "18.76       7"), {}, "line 29: #wrong is 7, allowed is 0"),
        (NCCL.replace("   52.41", "   fifty"), {}, "line 29: time is 'fifty'"),
        (NCCL[: NCCL.index("     1048576")], {}, "no line of results"),
        (NCCL + NCCL, {"nodes": 2, "ranks_per_node": 8}, "found 25, 59; put each run into its own file"),
        (OSU, {"nodes": 2}, "OSU benchmarks do not print where ranks ran"),
        (
            OSU,
            {"nodes": 0, "ranks_per_node": 2},
            "nodes is 0, must be at least 1",
        ),
        (OSU, {"collective": "all_reduce", "nodes": 2, "ranks_per_node": 2}, "but the file names all_gather"),
        (
            OSU.replace("Allgather", "Non-blocking Allgather"),
            {"nodes": 2, "ranks_per_node": 2},
            "line 2: test is 'Non-blocking Allg.*, Allreduce Lat",
        ),
        (
            OSU.replace("Latency Test", "Bandwidth Test"),
            {"nodes": 2, "ranks_per_node": 2},
            "'Allgather Bandwidth Test', allowed is one of Allgather Lat",
        ),
        (OSU.replace("Allgather ", ""), {"nodes": 2, "ranks_per_node": 2}, "2 x 2; osu_latency runs on 2 ranks"),
        (
            OSU.replace("104.30", "104.30  Fail"),
            {"nodes": 2, "ranks_per_node": 2},
            "line 6: found '1048576 104.30 Fail'",
        ),
        (CSV.replace(",nbytes", ",bytes"), {}, "no column nbytes; found source, .*, bytes, seconds, needed"),
        (CSV.replace("1e-5", "soon"), {}, "row 1, column seconds: found 'soon', allowed is a positive number"),
        (CSV + "box,broadcast,,2,8,1024,1e-5\n", {}, "row 2, column collective: found 'broadcast', allowed is one of"),
        (
            CSV.replace("1024", "1024.5"),
            {},
            r"column nbytes: found .*1024.5.*, allowed is a whole number of at least 0",
        ),
        (NCCL, {"ranks_per_node": 0}, "ranks_per_node is 0, must be at least 1"),
        (CSV.replace("box,", ",").replace(",2,8", ",2,0"), {}, "column ranks_per_node: found '0', allowed is a whole"),
        (CSV + "box,all_gather,,2,8,1024,1e-5,\n", {}, "Expected 7 fields in line 3, saw 8"),
        (CSV, {"nodes": 2}, "a CSV names .*leave them out"),
        ("hello\n", {}, "begins with 'hello'; allowed is the output of nccl-tests"),
        ("", {}, "begins with ''"),
    ],
)
def test_what_a_user_got_wrong_is_named(saved, text, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        measured_files.read(saved(text), **arguments)
    assert "output.txt" in str(error.value)
