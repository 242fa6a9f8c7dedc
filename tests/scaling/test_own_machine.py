"""docs/scaling.md, "Your own machine": its programs find what made the times that they are given."""

import re

import numpy as np
import pytest

from repro import paths, scaling
from repro.scaling import Hardware, collectives, fit

TRUE = {"overhead_s": 1e-5, "node.bytes_per_s.0": 0.8 * 450e9, "cluster.bytes_per_s.0": 0.7 * 50e9}
TRUE["network_latency"] = 1.2
NODES = (1, 2, 4)
HEADER = "#  size  count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong\n"


def program(holding: str) -> str:
    text = (paths.root() / "docs/scaling.md").read_text()
    (found,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if holding in block]
    return found


def ours() -> Hardware:
    """The example of a `Hardware`, by its program's first statements."""
    names: dict = {}
    exec(program("scaling.Hardware(").partition("links =")[0], names)
    return names["ours"]


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A folder with outputs of nccl-tests on nodes of 8 GPUs, by NCCL's reckoning, and of OSU, of the fit's own network."""
    monkeypatch.chdir(tmp_path)
    links = {"node": 1, "cluster": 8}
    sizes = [2**k for k in range(12, 34, 2)]
    for nodes in NODES:
        choices = fit.Model(links=links, nccl=True).choices(TRUE, (8, nodes))
        ranks = [f"#  Rank {rank} Pid {rank} on node{rank // 8} device {rank % 8} GPU\n" for rank in range(8 * nodes)]
        rows = [(nbytes, 1e6 * collectives.fastest("all_gather", nbytes, choices)) for nbytes in sizes]
        lines = [f"{nbytes} {nbytes // 4} float none -1 {us:.3f} 1 1 0 {us:.3f} 1 1 0\n" for nbytes, us in rows]
        (tmp_path / f"all_gather_perf_{nodes}.txt").write_text("".join([*ranks, HEADER, *lines]))
    network = ours().machine(4).network
    times = [(n, 1e6 * scaling.seconds("all_gather", 32 * n, network, "ring")) for n in sizes]
    osu = ["# OSU MPI Allgather Latency Test v7.4\n# Size Avg Latency(us)\n", *(f"{n} {us:.3f}\n" for n, us in times)]
    (tmp_path / "osu_allgather.txt").write_text("".join(osu))


@pytest.mark.usefixtures("measured")
def test_rates_fitted_to_nccl_tests_become_the_achieved_shares():
    names: dict = {}
    exec(program("measured_files"), names)
    assert set(names["table"].nodes) == set(NODES)
    assert np.median(names["achieved"]["node achieved"]) == pytest.approx(0.8, rel=0.03)
    assert np.median(names["achieved"]["cluster achieved"]) == pytest.approx(0.7, rel=0.03)
    (protocol,) = names["machine"].network.links[1].protocols
    np.testing.assert_allclose(protocol.bytes_per_s, names["rates"]["cluster.bytes_per_s.0"])
    assert names["step"].seconds.shape == (256,)


@pytest.mark.usefixtures("measured")
def test_of_mpi_the_fit_is_the_network():
    """By the lines that are comments."""
    names: dict = {}
    exec(re.sub(r"^# (?=table|found|machine)", "", program("measured_files"), flags=re.MULTILINE), names)
    assert names["network"].topology.mesh_shape == (48, 8)
    assert names["network"] is names["machine"].network and len(names["found"].values()) == 5
    assert np.isfinite(names["step"].seconds).all()


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_busbw_is_the_rate_of_all_links_of_the_slowest_level(nodes):
    """So it tells the achieved share as the table there says: of one node that of its links, of several that of the NICs."""
    kind = ours().at(**{"node achieved": 0.9, "cluster achieved": 0.7})
    network = kind.machine(nodes).network
    nbytes, ranks = 2**36, 8 * nodes
    busbw = nbytes / scaling.seconds("all_gather", nbytes, network, "ring") * (ranks - 1) / ranks  # of nccl-tests
    assert busbw == pytest.approx(0.9 * 450e9 if nodes == 1 else 0.7 * 8 * 50e9, rel=0.01)


def test_measured_steps_calibrate_the_model(capsys):
    """In the direction of the example's times, which are longer than predicted."""
    names: dict = {}
    exec(program("calibrate"), names)
    assert capsys.readouterr().out.startswith("{'message': ")
    before, after = (
        [one.predicted(f) for one in names["observed"]]
        for f in (dict.fromkeys(names["factors"], 1.0), names["factors"])
    )
    times = np.array(list(names["measured"].values()))
    assert np.abs(np.log(after / times)).max() < 0.1 < np.abs(np.log(before / times)).min()
