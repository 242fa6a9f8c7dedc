"""A fit finds the parameters that made the times, says how sure it is, and predicts what it did not see."""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest

from repro.scaling import collectives, fit, nccl, published
from repro.scaling.fit import Model
from repro.topology import Level, Topology

TRUE = {
    "overhead_s": 4e-6,
    "node.latency_s.0": 2e-6,
    "node.bytes_per_s.0": 1.5e11,
    "cluster.latency_s.0": 9e-6,
    "cluster.bytes_per_s.0": 1.2e10,
}
MODEL = Model(links={"cluster": 2}, algorithms={"ring": ("ring",), "bruck": ("bruck",)})


SHAPES = ((1, 2), (1, 4), (2, 1), (2, 4), (4, 4))


def measurements(values=TRUE, model=MODEL, noise=0.0, shapes=SHAPES, seed=0, kinds=("all_gather",)):
    """Times that the model itself gives, with log-normal noise."""
    rng, rows = np.random.default_rng(seed), []
    for nodes, per_node in shapes:
        network = model.network(values, (per_node, nodes)[-len(model.levels) :])
        for kind in kinds:
            for nbytes in np.geomspace(1e3, 1e8, 12):
                for algorithm in ("ring", "bruck") if kind == "all_gather" else ("ring",):
                    seconds = collectives.seconds(kind, nbytes, network, algorithm) * rng.lognormal(0, noise)
                    rows.append(("made", kind, algorithm, nodes, per_node, int(nbytes), seconds))
    columns = ["source", "collective", "algorithm", "nodes", "ranks_per_node", "nbytes", "seconds"]
    return pd.DataFrame(rows, columns=columns)


def test_exact_times_give_the_parameters_back():
    found = dict(zip(MODEL.names, np.exp(fit.fit(measurements(), MODEL).log_values), strict=True))
    assert found == pytest.approx(TRUE, rel=0.02)


def test_the_intervals_grow_with_the_noise():
    narrow, wide = (fit.fit(measurements(noise=noise), MODEL).table() for noise in (0.02, 0.2))
    assert np.log(wide.high / wide.low).median() > 2 * np.log(narrow.high / narrow.low).median()


ONE_LEVEL = Model(levels=("cluster",), algorithms=MODEL.algorithms)


@pytest.mark.parametrize("noise", [0.02, 0.1])
@pytest.mark.parametrize(("model", "shapes"), [(MODEL, SHAPES), (ONE_LEVEL, ((8, 1),))])
@pytest.mark.parametrize("kinds", [("all_gather",), ("all_gather", "reduce_scatter")])
def test_the_intervals_hold_the_truth(model, shapes, noise, kinds):
    """Also of one shape only, whose latency and overhead are one number: then their intervals say so."""
    values = {name: TRUE[name] for name in model.names}
    made = partial(measurements, values, model, noise, shapes, kinds=kinds)
    tables = [fit.fit(made(seed=seed), model).table() for seed in range(40 if model is ONE_LEVEL else 16)]
    truth = np.array(list(values.values()))
    assert np.mean([(table.low <= truth) & (truth <= table.high) for table in tables]) >= 0.9


def test_an_outlier_moves_a_robust_fit_little():
    table = measurements()
    table.loc[table.index[::17], "seconds"] *= 20
    found = dict(zip(MODEL.names, np.exp(fit.fit(table, MODEL).log_values), strict=True))
    assert found["cluster.bytes_per_s.0"] == pytest.approx(TRUE["cluster.bytes_per_s.0"], rel=0.1)


def test_a_larger_machine_is_predicted():
    found = fit.fit(measurements(noise=0.03), MODEL)
    larger = measurements(shapes=((16, 4), (32, 2)))
    assert fit.error_quantiles(fit.predict(found, larger).log_error, (1.0,))[0] < 0.1


def test_draws_spread_around_the_best_values():
    found = fit.fit(measurements(noise=0.1), MODEL)
    one = collectives.seconds("all_gather", 1e7, found.network(4, 8), "ring")
    many = collectives.seconds("all_gather", 1e7, found.network(4, 8, draws=400), "ring")
    assert many.shape == (400,)
    assert np.median(many) == pytest.approx(one, rel=0.05)
    assert 0 < many.std() < one


def test_the_switch_that_made_the_times_is_chosen():
    model = replace(MODEL, switches=(1e5,))
    values = TRUE | {
        "node.latency_s.1": 2e-5,
        "node.bytes_per_s.1": 2e11,
        "cluster.latency_s.1": 6e-5,
        "cluster.bytes_per_s.1": 2e10,
    }
    values["cluster.bytes_per_s.0"] = 2e9
    choices = fit.choose(measurements(values, model), MODEL, (1e4, 1e5, 1e6), at_most=1)
    assert choices.switches[0] == (1e5,)
    assert choices.error_median[0] < choices[choices.switches.map(len) == 0].error_median.iloc[0] / 3


def test_a_group_of_ranks_is_a_row_of_its_own():
    """As the probe has them: sizes of three levels, and hops over some of them."""
    model = Model(levels=("package", "node", "cluster"), algorithms={"ring": ("ring",)})
    truth = {"overhead_s": 1e-5}
    for level, rate in (("package", 8e7), ("node", 1.6e7), ("cluster", 4e6)):
        truth |= {f"{level}.latency_s.0": 1e-3, f"{level}.bytes_per_s.0": rate}
    rows = []
    for hop in (("package",), ("node",), ("cluster",), ("package", "node", "cluster")):
        for nbytes in (4096, 65536, 1 << 20, 1 << 22):
            seconds = collectives.seconds("all_gather", nbytes, model.network(truth, (2, 2, 2)), "ring", levels=hop)
            rows.append(("made", "all_gather", "ring", (2, 2, 2), hop, nbytes, seconds))
    columns = ["source", "collective", "algorithm", "sizes", "hop", "nbytes", "seconds"]
    found = fit.fit(pd.DataFrame(rows, columns=columns), model)
    values = dict(zip(model.names, np.exp(found.log_values), strict=True))
    for level in model.levels:
        assert values[f"{level}.bytes_per_s.0"] == pytest.approx(truth[f"{level}.bytes_per_s.0"], rel=0.05)


def test_slow_processors_are_told_from_slow_links_by_other_rates_of_the_links():
    """On an emulated network both move the same bytes: one rate leaves open which of them takes the time."""
    model = Model(("package", "node"), algorithms={"direct": ("direct",)}, reduces=True, host=True)
    truth = {"overhead_s": 1e-4, "reduce_bytes_per_s": 2e8, "host_bytes_per_s": 5e8}
    truth |= {"package.latency_s.0": 1e-3, "package.bytes_per_s.0": 5e7}
    truth |= {"node.latency_s.0": 1e-3, "node.bytes_per_s.0": 1.25e7}

    def fitted(*scales):
        rows = []
        for scale in scales:
            slower = model.network(fit._scaled(truth, scale), (2, 4))
            cases = itertools.product(("all_gather", "reduce_scatter"), model.levels, (4096, 65536, 1 << 20, 1 << 22))
            for kind, level, nbytes in cases:
                seconds = collectives.seconds(kind, nbytes, slower, "direct", levels=[level])
                rows.append(("made", kind, "direct", (2, 4), (level,), nbytes, scale, seconds))
        columns = ["source", "collective", "algorithm", "sizes", "hop", "nbytes", "scale", "seconds"]
        return fit.fit(pd.DataFrame(rows, columns=columns), model)

    found = fitted(0.25, 1, 2)
    for name in ("host_bytes_per_s", "package.bytes_per_s.0", "node.bytes_per_s.0"):
        assert found.values()[name] == pytest.approx(truth[name], rel=0.1)
    (protocol,) = found.network(2, 4, scale=0.25).links[0].protocols
    assert protocol.bytes_per_s == pytest.approx(0.25 * 5e7, rel=0.1)
    assert fitted(1).values()["package.bytes_per_s.0"] > 1.5 * 5e7


def test_tables_that_the_model_cannot_read_are_refused():
    with pytest.raises(ValueError, match="'bruck' of the table has no counterpart"):
        fit.fit(measurements(), replace(MODEL, algorithms={"ring": ("ring",)}))
    with pytest.raises(ValueError, match="several ranks a node"):
        fit.fit(measurements(), replace(MODEL, levels=("cluster",)))


def test_nccls_choice_is_fitted_by_rates_overhead_and_one_factor_on_latencies():
    """Times of a network whose hops take longer than NCCL's tuner reckons: nodes of 8 ranks are predicted from nodes of up to 4."""
    model = Model(nccl=True)
    truth = {"overhead_s": 1e-5, "node.bytes_per_s.0": 3e11, "cluster.bytes_per_s.0": 2e10, "network_latency": 1.6}
    table = nccl_times(model, truth, ((1, 2), (1, 4), (2, 1), (4, 1)))
    found = fit.fit(table, model)
    assert model.names == list(truth)
    assert found.values() == pytest.approx(truth, rel=0.02)
    larger = fit.predict(found, nccl_times(model, truth, ((1, 8), (4, 8))))
    assert larger.log_error.abs().max() < 0.02
    with pytest.raises(ValueError, match="a network for each algorithm"):
        found.network(8, 2)


def test_eight_links_about_as_fast_as_the_level_inside_are_found_from_their_nominal_rate():
    """The default begins with each link as fast as all eight are together. Then every time is NVLink's alone."""
    model = Model(links={"cluster": 8}, nccl=True)
    truth = {"overhead_s": 1e-5, "node.bytes_per_s.0": 3.6e11, "cluster.bytes_per_s.0": 3.5e10, "network_latency": 1.0}
    table = nccl_times(model, truth, ((1, 8), (2, 8), (4, 8)))
    found = fit.fit(table, replace(model, nominal={"node": 4.5e11, "cluster": 5e10}))
    assert found.values() == pytest.approx(truth, rel=0.05)
    assert fit.fit(table, model).values()["cluster.bytes_per_s.0"] > 1.2 * truth["cluster.bytes_per_s.0"]


@pytest.mark.parametrize("named", [{"links": {"nodes": 8}}, {"nominal": {"clusters": 5e10}}, {"levels": ()}])
def test_a_model_of_levels_that_it_does_not_have_is_refused(named):
    """Ranks would have had a NIC each."""
    with pytest.raises(ValueError, match=r"levels are \(.*allowed are the levels"):
        Model(**named)


def test_tables_that_nothing_can_be_fitted_to_are_refused():
    table = measurements(shapes=((2, 2),))
    with pytest.raises(ValueError, match="no rows"):
        fit.fit(table[:0], MODEL)
    with pytest.raises(ValueError, match=r"sizes of 2 levels, \(2, 2\), the model package, node, cluster"):
        fit.fit(table, replace(MODEL, levels=("package", "node", "cluster")))
    with pytest.raises(ValueError, match="1 machine shape in the table: needed are two"):
        fit.choose(table, MODEL, [65536.0])


def test_what_a_further_rank_costs_is_fitted_to_all_to_alls():
    model = Model(nccl=True, peers=True)
    truth = {"overhead_s": 4e-6, "node.bytes_per_s.0": 2e11, "cluster.bytes_per_s.0": 2e10, "peer_s": 2e-6}
    slower = truth | {"network_latency": 1.3}
    found = fit.fit(nccl_times(model, slower, ((1, 4), (2, 4), (8, 4)), "all_to_all"), model).values()
    # All-to-alls tell little of a hop's latency, so the weak prior at 1 shows.
    assert found.pop("network_latency") == pytest.approx(1.3, rel=0.1)
    assert found == pytest.approx(truth, rel=0.05)


def nccl_times(model, values, shapes, kind="all_reduce"):
    rows = []
    for nodes, per_node in shapes:
        choices = model.choices(values, (per_node, nodes))
        for nbytes in np.geomspace(2e3, 1e9, 10).astype(int):
            seconds = collectives.fastest(kind, nbytes, choices)
            rows.append(("made", kind, "", nodes, per_node, nbytes, seconds))
    return pd.DataFrame(
        rows, columns=["source", "collective", "algorithm", "nodes", "ranks_per_node", "nbytes", "seconds"]
    )


def test_nccls_reckoning_by_hand():
    """A ring of 4 by Simple: 8.4 us, six hops of 3.4 us, and 2 x 3/4 of the bytes. LL carries half as fast, up to 87.7 GB/s."""
    topology = Topology((Level("node", 4),))
    ll, _, simple = (net for net, names in nccl.networks(topology, [1], [1e11], 1e-6) if "ring" in names)
    large = 1e-6 + 8.4e-6 + 6 * 3.4e-6 + 1.5e8 / 1e11
    assert collectives.seconds("all_reduce", 1e8, simple, "ring") == pytest.approx(large)
    small = 1e-6 + 6.6e-6 + 6 * 0.6e-6 + 1.5e3 / 5e10
    assert collectives.seconds("all_reduce", 1e3, ll, "ring") == pytest.approx(small)
    assert collectives.fastest("all_reduce", 1e8, [(ll, ["ring"]), (simple, ["ring"])]) == pytest.approx(large)


@pytest.mark.parametrize(("nodes", "ll128"), [(1, 0.92 * 7 / 9), (2, 0.92 * 120 / 128), (16, 0.92 * 120 / 128)])
def test_trees_have_their_own_share_and_that_of_their_protocol(nodes, ll128):
    """An all-reduce by trees has 0.92 of the rate, LL 1/3.8 of that, LL128 7/9 on one node and else 120/128."""
    topology = Topology((Level("node", 4), Level("cluster", nodes)))
    found = [net for net, names in nccl.networks(topology, [1, 4], [1e11, 1e10]) if "tree" in names]
    for level, rate in ((0, 1e11), (1, 1e10)):
        shares = [net.links[level].protocols[0].bytes_per_s / rate for net in found]
        assert shares == pytest.approx([0.92 / 3.8, ll128, 0.92])


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (64, (1, 1, 0.9)),
        (2**10, (0.9, 1, 0.9)),
        (2**18, (0.4, 0.6, 0.5)),
        (2**19, (0.4, 0.6, 0.5)),
        (2**24, (0.9, 0.9, 0.7)),
        (2**28, (1, 1, 0.9)),
        (2**29, (1, 1, 1)),
        (2**33, (1, 1, 1)),
        (2**22.5, (0.75, 0.85, 0.75)),
        (0, (1, 1, 0.9)),
    ],
)
def test_trees_of_medium_size_are_slower_as_in_nccls_table(nbytes, expected):
    """By LL, LL128 and Simple. Between the sizes of the table along a line; rings have none."""
    topology = Topology((Level("node", 4), Level("cluster", 16)))
    found = nccl.networks(topology, [1, 4], [1e11, 1e10])
    for name, shares in (("tree", expected), ("ring", (1, 1, 1))):
        hops = [net.links[level].protocols[0] for net, names in found if name in names for level in (0, 1)]
        assert [hop.rate(nbytes) / hop.bytes_per_s for hop in hops] == pytest.approx(
            [x for x in shares for _ in (0, 1)]
        )


@pytest.mark.parametrize("nodes", [2, 4, 16, 64, 256])
def test_a_larger_all_reduce_takes_no_less_time_whatever_nccl_chooses(nodes):
    """Steps between the table's sizes would let 15 % more bytes take 15 % less time. On some numbers of ranks 2 % is left:
    a hop waits for a chunk at the same rate, and a chunk does not grow."""
    choices = nccl.networks(Topology((Level("node", 8), Level("cluster", nodes))), [1, 4], [2e11, 1.1e10], 8e-6)
    times = np.array([collectives.fastest("all_reduce", n, choices) for n in np.geomspace(1e3, 1e9, 250)])
    assert (times > 0.98 * np.maximum.accumulate(times)).all()
    by_name = {
        n: min((collectives.seconds("all_reduce", n, net, each), each) for net, names in choices for each in names[:1])[
            1
        ]
        for n in (1e3, 1e10)
    }
    assert by_name == {1e3: "tree", 1e10: "tree" if nodes == 2 else "ring"}


@pytest.mark.parametrize(("nodes", "at_most"), [(1, 87.7e9), (2, 39e9), (3, 20.4e9), (64, 20.4e9)])
def test_ll_has_a_limit_out_of_a_node_however_fast_the_links_are(nodes, at_most):
    topology = Topology((Level("node", 4), Level("cluster", nodes)))
    found = nccl.networks(topology, [1, 4], [np.array([1e12, 1e9])] * 2)
    ring, tree = (found[i][0].links[nodes > 1] for i in (0, 3))
    assert ring.count * ring.protocols[0].bytes_per_s == pytest.approx([at_most, ring.count * 0.5e9])
    assert tree.count * tree.protocols[0].bytes_per_s == pytest.approx([at_most, tree.count * 0.92e9 / 3.8])


def test_without_ll128_between_nodes_it_still_runs_on_one():
    """Alps: the NIC is behind the processor."""
    assert not published.alps().model.ll128 and published.leonardo().model.ll128
    values = {"node.bytes_per_s.0": 1e11, "cluster.bytes_per_s.0": 2e10, "overhead_s": 0.0}
    for nodes, expected in ((1, 6), (2, 4)):
        model = Model(nccl=True, ll128=False)
        chunks = [net.links[0].protocols[0].chunk_bytes for net, _ in model.choices(values, (4, nodes))]
        assert len(chunks) == expected and (576e3 in chunks) == (nodes == 1)


def test_published_slingshot_is_predicted_on_machines_that_were_not_fitted():
    """8 and 16 nodes fitted; 32 and 100 nodes, and reduce-scatter, predicted: half of them within a fifth."""
    study = published.slingshot11()
    fitted, held_out = study.split("ranks")
    assert set(fitted.nodes) == {8, 16} and set(held_out.nodes) == {32, 100}
    assert "reduce_scatter" not in set(fitted.collective)
    found = fit.fit(fitted, replace(study.model, switches=(65536,)))
    assert fit.error_quantiles(fit.predict(found, held_out).log_error)[0] < 0.2


@pytest.mark.parametrize("name", published.STUDIES)
def test_what_is_held_out_is_larger_and_never_fitted(name):
    study = published.STUDIES[name]()
    for split, column in (("ranks", "ranks"), ("sizes", "nbytes")):
        fitted, held_out = (t.assign(ranks=t.nodes * t.ranks_per_node) for t in study.split(split))
        assert len(fitted) + len(held_out) == len(study.table) and len(held_out) > 30
        assert fitted[column].max() < held_out[column].min()


def test_eight_gpus_are_predicted_from_two_and_four_where_messages_are_large():
    """NCCL's own latencies: the waiting of small messages is not taken for hops, of which eight ranks have more."""
    fitted, held_out = published.a100_node().split("ranks")
    found = fit.fit(fitted, published.a100_node().model)
    large = fit.predict(found, held_out[held_out.nbytes > published.LARGE])
    median, p90 = fit.error_quantiles(large.log_error)
    assert median < 0.15 and p90 < 0.4
