"""The emulated network: the commands that build it, and (as root) that bytes, rates and clean-up are what they
claim."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from repro.emulate import netns as module
from repro.emulate import owners
from repro.emulate.netns import Fabric, FabricError, unavailable
from repro.launch import LaunchTimeout, RankError, launch
from repro.topology import Level, Topology, frontier, scaled

# 2 nodes x 2 packages x 2 GCDs at 50, 12.5 and 3.125 MB/s per rank: slow enough for two busy cores
TOPOLOGY = scaled(frontier(2, packages=2, gcds=2), 3.125e6)
pytestmark = pytest.mark.xdist_group("network")
needs_root = [
    pytest.mark.root,
    pytest.mark.skipif(unavailable() is not None, reason=f"no emulated network here: {unavailable()}"),
]


def namespaces(pid: int | None = None) -> set[str]:
    """Those of a process, or all: other programs of this machine may have their own."""
    return {path.name for path in Path("/run/netns").glob("*" if pid is None else f"repro-{pid}-*")}


@pytest.fixture
def nothing_left():
    before = namespaces(os.getpid())
    yield
    assert namespaces(os.getpid()) == before


# --- without root ---------------------------------------------------------------------------------------------------


def test_an_uplink_carries_the_rate_of_all_ranks_of_its_package():
    topology = Topology((Level("package", 4, 1e8), Level("node", 2, 1e7), Level("cluster", 3, 1e6)))
    lines = list(module._rates(topology, range(24), range(6)))
    for device in [f"{end}{package}" for package in range(6) for end in "ud"]:
        classes = [line for line in lines if f"class replace dev {device} " in line]
        assert " classid 1:10 htb rate 40000000bps ceil 40000000bps " in classes[0]
        assert " classid 1:20 htb rate 4000000bps ceil 4000000bps " in classes[1]
    tbf = [line for line in lines if " tbf " in line]
    assert len(tbf) == 24 and all(" rate 100000000bps " in line for line in tbf)


def test_traffic_is_classed_by_the_node_at_the_far_end():
    lines = list(module._uplinks(frontier(3, packages=2, gcds=2)))
    filters = {line.split()[3]: line for line in lines if "flowid 1:10" in line}
    assert " match ip dst 10.99.2.0/24 " in filters["u4"] and " match ip src 10.99.2.0/24 " in filters["d4"]
    assert " match ip dst 10.99.0.0/24 " in filters["u1"]


def test_every_rank_has_an_address_in_its_nodes_prefix():
    topology = frontier(3)
    addresses = [module.address(topology, rank) for rank in range(topology.world_size)]
    assert len(set(addresses)) == 24
    assert [address.split(".")[2] for address in addresses] == [str(topology.place(rank)[2]) for rank in range(24)]


def test_interface_names_fit_the_kernel():
    lines = module._links(frontier(256, packages=4, gcds=2), "repro-1-1-1-")
    names = {line.split()[2] for line in lines if line.startswith("link add ")}
    assert len(names) == 1 + 2 * 1024 + 2048 and max(map(len, names)) <= 15


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (Topology((Level("node", 2, 1e6), Level("cluster", 2, 1e6))), "has 2: node, cluster"),
        (Topology((Level("package", 2), Level("node", 2, 1e6), Level("cluster", 2, 1e6))), "'package' has no rate"),
        (frontier(257), "257 nodes"),
        (frontier(1, packages=128), "256 ranks"),
        (scaled(frontier(1), 1e11), "level 'package': 1.6e.12 bytes/s, allowed here: 1 to 3.9e.11"),
        (Topology((Level("package", 4, 1e8), Level("node", 2, 1e11), Level("cluster", 2, 1e8))), "'node': .* 9.76e.10"),
        (scaled(frontier(1), 0.4), "level 'cluster': 0.4 bytes/s"),
    ],
)
def test_a_topology_it_cannot_shape(topology, message):
    with pytest.raises(ValueError, match=message):
        Fabric(topology)


@pytest.mark.parametrize(
    ("platform", "user", "tool", "reason"),
    [
        ("darwin", 0, "/sbin/tc", "need Linux, this is darwin"),
        ("linux", 1000, "/sbin/tc", "need root"),
        ("linux", 0, None, "ip and tc .* not found"),
    ],
)
def test_what_is_missing_is_said_in_words(monkeypatch, platform, user, tool, reason):
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setattr("shutil.which", lambda name, path: tool)
    with pytest.raises(FabricError, match=reason), Fabric(TOPOLOGY):
        pass
    unavailable.cache_clear()
    assert isinstance(unavailable(), str)
    unavailable.cache_clear()


def test_a_command_that_says_nothing_of_its_failure():
    with pytest.raises(FabricError, match="failed: exit code 3"):
        module.command(["sh", "-c", "exit 3"])


@pytest.mark.parametrize("moment", ["before it is opened", "when it was locked"])
def test_a_network_that_is_released_while_another_looks_for_abandoned_ones(tmp_path, monkeypatch, moment):
    monkeypatch.setattr(owners, "RECORDS", tmp_path / "records")
    owners.claim("1-dead", ["one"])
    owners._held.pop("1-dead").close()
    owners.claim("2-lives", ["two"])
    found = owners.abandoned()
    assert next(found) == ["one"]
    if moment == "before it is opened":
        owners.release("2-lives")
    else:
        (owners.RECORDS / "1-dead").unlink()
    assert list(found) == []
    owners.release("2-lives")
    assert not list(owners.RECORDS.iterdir())


def test_launch_refuses_a_fabric_of_another_size():
    with pytest.raises(ValueError, match="world_size is 4, but the fabric has 8 ranks"):
        launch(divmod, 4, fabric=Fabric(TOPOLOGY))


# --- as root --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fabric():
    with Fabric(TOPOLOGY) as built:
        yield built


def interfaces(rank: int, world_size: int) -> tuple[str, str]:
    shown = subprocess.run(["ip", "-br", "addr"], capture_output=True, text=True, check=True).stdout
    return " ".join(sorted(line.split()[0].partition("@")[0] for line in shown.splitlines())), shown


def exchange(rank: int, world_size: int, size: int, pairs: list[tuple[int, int]]) -> None:
    """Each (source, target) of `pairs`: `size` bytes."""
    inbox = [dist.irecv(torch.empty(size, dtype=torch.uint8), source) for source, target in pairs if target == rank]
    outbox = [dist.isend(torch.zeros(size, dtype=torch.uint8), target) for source, target in pairs if source == rank]
    for handle in inbox + outbox:
        handle.wait()
    dist.barrier()


def receive_rates(rank: int, world_size: int, size: int, target: int) -> float:
    """Bytes per second of the best of three transfers from rank 0 to `target`, as that rank saw it."""
    rates = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            dist.send(torch.zeros(size, dtype=torch.uint8), target)
        elif rank == target:
            dist.recv(torch.empty(size, dtype=torch.uint8), 0)
        rates.append(size / (time.perf_counter() - start))
    return max(rates)


def there_and_back(rank: int, world_size: int, size: int, target: int) -> float:
    """Seconds of the fastest of ten messages from rank 0 to `target` and back, each after a pause."""
    message, took = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(10):
        dist.barrier()
        time.sleep(0.05)
        start = time.perf_counter()
        if rank == 0:
            dist.send(message, target)
            dist.recv(message, target)
        elif rank == target:
            dist.recv(message, 0)
            dist.send(message, 0)
        took.append(time.perf_counter() - start)
    return min(took)


class TestShaped:
    pytestmark = needs_root

    def test_a_rank_sees_only_its_own_interface(self, fabric):
        for rank, (names, shown) in enumerate(launch(interfaces, 8, fabric=fabric)):
            assert names == "eth0 lo" and f" {module.address(TOPOLOGY, rank)}/16" in shown

    @pytest.mark.parametrize(("target", "level"), [(1, "package"), (2, "node"), (4, "cluster")])
    def test_a_transfer_is_counted_for_the_level_it_crosses(self, fabric, target, level):
        size, before = 4_000_000, fabric.counters()
        launch(exchange, 8, size, [(0, target)], fabric=fabric)
        moved = {name: count - before[name] for name, count in fabric.counters().items()}
        assert (
            1.0 <= moved.pop(level) / size <= 1.08
        )  # 66 bytes of headers on 1448, acknowledgements, the group's set-up
        assert max(moved.values()) <= 0.03 * size, moved

    def test_an_all_to_all_is_counted_by_pairs(self, fabric):
        """Every rank has 1 partner in its package, 2 more in its node and 4 beyond."""
        size, before = 400_000, fabric.counters()
        pairs = [(a, b) for a in range(8) for b in range(8) if a != b]
        launch(exchange, 8, size, pairs, fabric=fabric)
        for (level, count), partners in zip(fabric.counters().items(), (1, 2, 4), strict=True):
            assert 1.0 <= (count - before[level]) / (8 * partners * size) <= 1.1, level

    def test_no_level_is_faster_than_its_rate(self, fabric):
        """A busy machine only makes transfers slower, so the limit holds on any; a lone rank has its package's
        uplink."""
        size = 4_000_000
        found = {target: launch(receive_rates, 8, size, target, fabric=fabric)[target] for target in (1, 2, 4)}
        for (target, rate), level in zip(found.items(), TOPOLOGY.levels, strict=True):
            limit = level.bytes_per_s * (1 if target == 1 else 2)
            burst = 2 * (module._PACKET + limit * module._BURST_S)
            assert rate <= limit * size / (size - burst), (
                f"to rank {target}: {rate / 1e6:.1f} of {limit / 1e6:.1f} MB/s"
            )
        assert found[1] > 2 * TOPOLOGY.levels[2].bytes_per_s * 1.2, "the package is no faster than the cluster's links"

    def test_a_link_that_was_idle_lets_little_pass_at_once(self, fabric):
        """There and back, so that one clock tells; each way may have a millisecond and a packet for nothing."""
        size, rate = 28_000, 2 * TOPOLOGY.levels[2].bytes_per_s
        fastest = launch(there_and_back, 8, size, 4, fabric=fabric)[0]
        assert fastest >= 2 * (size - module._PACKET - rate * module._BURST_S) / rate

    def test_a_slow_transfer_is_a_timeout_and_no_hang(self):
        """All ranks are inside torch.distributed at the deadline, but bytes still flow."""
        with Fabric(TOPOLOGY) as fabric, pytest.raises(LaunchTimeout) as caught:
            launch(exchange, 8, 40_000_000, [(rank, rank ^ 4) for rank in range(8)], fabric=fabric, timeout_s=2)
        assert type(caught.value) is LaunchTimeout

    def test_tools_that_are_not_on_the_path_are_found(self, tmp_path, monkeypatch):
        """As that of root behind a plain `su` lacks their folders."""
        monkeypatch.setenv("PATH", str(tmp_path))
        with Fabric(frontier(1, 1, 2)) as fabric:
            assert fabric.counters()

    def test_two_fabrics_coexist_with_the_same_addresses(self, fabric):
        with Fabric(TOPOLOGY) as other:
            before, size = fabric.counters(), 1_000_000
            launch(exchange, 8, size, [(0, 1)], fabric=other)
            assert other.counters()["package"] >= size
            assert sum(fabric.counters().values()) - sum(before.values()) < size / 100
            assert other.namespace(0) != fabric.namespace(0)
        assert launch(divmod, 8, fabric=fabric)[3] == (0, 3)

    def test_it_is_removed_after_an_exception(self, nothing_left):
        with pytest.raises(ZeroDivisionError), Fabric(TOPOLOGY) as built:
            assert built.namespace(7) in namespaces()
            _ = 1 / 0

    def test_it_is_removed_when_building_fails_and_the_failing_command_is_named(self, nothing_left, monkeypatch):
        monkeypatch.setattr(
            module, "_rates", lambda *_: ["qdisc add dev v0 root tbf rate 1mbit burst 9kb limit 9", "bad"]
        )
        with pytest.raises(FabricError, match=r"`tc -n \S+fab bad` failed: .*bad.* is unknown"), Fabric(TOPOLOGY):
            pass

    def test_it_can_be_built_again(self, nothing_left):
        built = Fabric(TOPOLOGY)
        for _ in range(2):
            with built:
                assert set(built.counters()) == {"package", "node", "cluster"}

    def test_what_a_killed_owner_left_is_removed_by_the_next(self, fabric):
        """Two checkouts, or two users of the machine, are two processes here: whoever lives keeps its network."""
        script = "from repro import topology; from repro.emulate import netns as fabric; import time\n"
        script += (
            "with fabric.Fabric(topology.frontier(1, 1, 2)) as f: print(f.namespace(0), flush=True); time.sleep(60)"
        )
        before = namespaces(os.getpid())
        owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        name = owner.stdout.readline().strip()
        with Fabric(TOPOLOGY):
            assert name in namespaces(), "its owner is alive"
        owner.kill()
        owner.communicate()
        assert len(namespaces(owner.pid)) == 3
        with Fabric(TOPOLOGY):
            assert not namespaces(owner.pid)
        assert namespaces(os.getpid()) == before and fabric.namespace(0) in namespaces()

    def test_foreign_namespaces_stay(self):
        names = {
            "repro",
            "repro-box",
            "repro-mine",
            "repro-2024-01-01-mine",
            "repro-1-1-0-fab",  # as a dead owner's were once called
            "repro-4194304-0a1b2c3d-0",  # as one of a dead owner would be
            "repro-box-gcd-0",
            "repro-box-node1",
        }
        foreign = names - set(namespaces())
        assert foreign, "somebody has all of them"
        for name in foreign:
            module.command(["ip", "netns", "add", name])
        try:
            with Fabric(TOPOLOGY):
                assert foreign <= set(namespaces())
            assert foreign <= set(namespaces())
        finally:
            for name in foreign:
                module.command(["ip", "netns", "del", name])


def test_namespace_of_a_rank_outside():
    with pytest.raises(ValueError, match="rank 8 is outside"):
        Fabric(TOPOLOGY).namespace(8)


def test_ranks_on_a_network_that_nobody_has_built():
    with pytest.raises(RankError, match="not built yet"):
        launch(divmod, 2, fabric=Fabric(frontier(1, 1, 2)))
