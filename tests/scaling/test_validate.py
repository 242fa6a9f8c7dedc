"""Bands hold what they say, on made times whose truth is known and on published ones that were held out."""

import numpy as np
import pandas as pd
import pytest

from repro import experiments
from repro.experiments.scaling_network import ScalingNetwork
from repro.scaling import collectives, fit, published, validate
from repro.scaling.fit import Model
from repro.scaling.validate import Band

MODEL = Model(levels=("cluster",), algorithms={"ring": ("ring",)})
TRUE = {"overhead_s": 4e-6, "cluster.latency_s.0": 9e-6, "cluster.bytes_per_s.0": 1.2e10}
SIZES = tuple(np.geomspace(1e3, 1e8, 18))
COLUMNS = ["source", "collective", "algorithm", "nodes", "ranks_per_node", "nbytes", "seconds"]


def times(nodes, noise, seed, sizes=SIZES):
    """A ring's times. Each size and number of nodes also has an error of its own, as a library's jumps make."""
    rng, rows = np.random.default_rng(seed), []
    for count in nodes:
        network = MODEL.network(TRUE, (count,))
        for nbytes in sizes:
            seconds = collectives.seconds("all_gather", nbytes, network, "ring") * rng.lognormal(0, noise)
            rows.append(("made", "all_gather", "ring", count, 1, int(nbytes), seconds))
    return pd.DataFrame(rows, columns=COLUMNS)


def banded(fitted, held_out):
    return validate.banded(fit.fit(fitted, MODEL), fitted, held_out, validate.band(fitted, MODEL))


@pytest.mark.parametrize("machines, least", [(4, 0.8), pytest.param(16, 0.86, marks=pytest.mark.exhaustive)])
def test_about_nine_tenths_of_held_out_times_are_inside_a_band_that_is_not_much_too_wide(machines, least):
    """Pooled over made machines. The 36 rows of one err together: of sets of four machines 85 to 97 % are inside, of 40
    machines 91 to 92 %. Hence bounds below the band's 90 %. The noise is 15 %, so the exact band is a factor of 1.28."""
    found = pd.concat([banded(times((4, 8), 0.15, k), times((16, 32), 0.15, 1000 + k)) for k in range(machines)])
    assert least <= found.inside.mean() <= 0.99
    assert np.sqrt(found.high / found.low).median() < 1.28**2


def test_bands_grow_with_the_distance_from_what_was_fitted():
    band = Band(pd.Series([0.1] * 40, index=np.geomspace(1e3, 1e6, 40)), {"bytes": 0.03, "ranks": 0.01})
    rows = pd.DataFrame({"nbytes": [1e6, 2e6, 4e6]})
    away = pd.DataFrame({"bytes": [0.0, 1, 2], "ranks": [0.0, 0, 1], "collectives": 0.0})
    assert band.half_widths(rows, away) == pytest.approx(np.sqrt([0.01, 0.04, 0.08]))
    with pytest.raises(ValueError, match="no band beyond the fitted collectives"):
        band.half_widths(rows, away.assign(collectives=1.0))


def test_where_small_messages_are_noisy_only_their_bands_are_wide():
    near = pd.Series([0.5] * 40 + [0.1] * 40, index=np.geomspace(1e3, 1e9, 80))
    away = pd.DataFrame({"bytes": [0.0, 0], "ranks": 0.0, "collectives": 0.0})
    assert Band(near, {}).half_widths(pd.DataFrame({"nbytes": [2e3, 5e8]}), away) == pytest.approx([0.5, 0.1])


def test_distances_count_doublings_beyond_the_fitted_rows():
    fitted, rows = (
        fit.shaped(times(nodes, 0, 0, sizes), MODEL) for nodes, sizes in (((4, 8), (1e3, 1e6)), ((2, 32), (1e4, 4e6)))
    )
    away = validate.distances(fitted, rows.assign(collective=["all_gather", "all_reduce"] * 2))
    assert away.bytes.tolist() == pytest.approx([0, 2, 0, 2])
    assert away.ranks.tolist() == pytest.approx([1, 1, 2, 2])
    assert away.collectives.tolist() == [0, 1, 0, 1]


def test_every_row_is_left_out_once_near_and_folds_leave_rows_to_fit():
    table = fit.shaped(times((4, 8, 16), 0, 0), MODEL)
    masks = [(kind, mask) for kind, mask in validate.folds(table)]
    assert sum(mask.astype(int) for kind, mask in masks if not kind).eq(1).all()
    assert all(0 < mask.sum() < len(table) for _, mask in masks)
    assert {kind for kind, _ in masks} == {"", "bytes", "ranks"}  # of one collective none can be left out
    with pytest.raises(ValueError, match="three sizes to leave some out, found 2"):
        validate.band(times((4, 8), 0, 0, (1e3, 1e6)), MODEL)


def test_a_message_without_a_byte_is_as_near_as_one_of_a_byte():
    """osu_latency begins at 0 bytes."""
    table = times((4, 8), 0.1, 0, (1, 1e3, 1e5, 1e7))
    empty = table.assign(nbytes=table.nbytes.where(table.nbytes > 1, 0))
    one, none = (validate.band(each, MODEL, carry=True) for each in (table, empty))
    assert none.growth == pytest.approx(one.growth, rel=1e-3) and set(none.growth) == {"bytes", "ranks"}
    found = validate.banded(fit.fit(empty, MODEL), empty, empty[:1], none, carry=True)
    assert found.low[0] < found.seconds[0] < found.high[0]


def test_published_times_on_more_nodes_are_inside_the_band():
    """Slingshot-11 fitted on 8 and 16 nodes: of the times on 32 and 100 nodes, nine tenths."""
    study = published.slingshot11()
    fitted, held_out = study.split("ranks")
    model = study.model
    found = validate.banded(fit.fit(fitted, model), fitted, held_out, validate.band(fitted, model))
    assert found.inside.mean() >= 0.9
    assert np.sqrt(found.high / found.low).median() < 2


@pytest.mark.parametrize(("study", "most"), [(published.leonardo, 256), (published.lumi, 64)])
def test_more_nodes_are_predicted_as_well_as_aimed_at(study, most):
    """Fitted on up to 16 nodes: on up to 256 or 64 half of the errors are within 15 %, nine tenths within 40."""
    made = study()
    fitted, held_out = made.split("ranks")
    assert fitted.nodes.max() == 16 < 32 == held_out.nodes.min() and held_out.nodes.max() == most
    assert validate.carries(fitted, made.model)
    found = validate.predicted(fit.fit(fitted, made.model), fitted, held_out, carry=True)
    assert set(found.collective) == {"all_reduce", "all_to_all"}
    median, within = fit.error_quantiles(found.log_error)
    assert median < 0.15 and within < 0.4


@pytest.mark.parametrize(("study", "median", "within"), [(published.leonardo, 0.15, 0.4), (published.alps, 0.25, 0.6)])
def test_larger_messages_are_predicted_from_smaller_ones(study, median, within):
    """Fitted to at most 1 MiB. Leonardo's reach the aim; Alps's were 74 and 176 % off without the limits of LL and LL128."""
    made = study()
    fitted, held_out = made.split("sizes")
    found = fit.error_quantiles(fit.predict(fit.fit(fitted, made.model), held_out).log_error)
    assert found[0] < median and found[1] < within


def test_frontiers_nodes_as_measured_on_lumi_use_all_their_nics():
    """Nothing fitted: large messages take about as long as on the catalogue's Frontier, and a fifth of the time with one ring."""
    study = published.lumi()
    for how, expected in (("machine", 1.3), ("scenario", 5.2)):
        table = published.by_catalogue(study, how, draws=8)
        large = table[(table.collective == "all_reduce") & (table.nbytes >= 2**30) & table.nodes.between(4, 33)]
        assert np.exp(large.log_error.median()) == pytest.approx(expected, rel=0.1)


def test_all_to_alls_on_lumi_are_predicted_by_the_catalogue_from_few_bytes_on():
    """On 2 to 64 nodes; the catalogue's cost of a message to a further rank is from these times, all else is not."""
    table = published.by_catalogue(published.lumi(), draws=8)
    sent = table[(table.collective == "all_to_all") & (table.nodes > 1)]
    each = sent.nbytes / (sent.nodes * 8)
    for some, median, most in ((each <= 4096, 0.35, 0.7), (each >= 2**21, 0.15, 0.3)):
        found = fit.error_quantiles(sent[some].log_error, (0.5, 1.0))
        assert found[0] < median and found[1] < most, found


def test_a_machine_that_was_not_fitted_has_a_band_of_its_intervals():
    table = published.by_catalogue(published.a100_node(), draws=32)
    assert (table.low < table.high).all() and (table.predicted > 0).all()
    assert len(table) == len(published.a100_node().table)
    with pytest.raises(ValueError, match="no machine of the catalogue"):
        published.by_catalogue(published.slingshot11())
    with pytest.raises(ValueError, match="no machine of the catalogue is like this study's for the split 'scenario'"):
        experiments.get("scaling_network").run(ScalingNetwork(source="a100_node", split="scenario"))


def jumping(nodes, seed, shared):
    """Times with an error for each size: of all numbers of nodes alike (`shared`), as of a library's jumps, or of each."""
    rng, table = np.random.default_rng(seed), times(nodes, 0, 0)
    per_size = dict(zip(sorted(table.nbytes.unique()), rng.lognormal(0, 0.5, len(SIZES)), strict=True))
    factors = table.nbytes.map(per_size) if shared else rng.lognormal(0, 0.5, len(table))
    return table.assign(seconds=table.seconds * factors)


def test_jumps_of_the_library_are_carried_over_to_more_ranks():
    table = jumping((4, 8, 16, 64), 1, shared=True)
    fitted, held_out = table[table.nodes <= 16], table[table.nodes == 64]
    assert validate.carries(fitted, MODEL)
    found = fit.fit(fitted, MODEL)
    plain, carrying = (validate.predicted(found, fitted, held_out, how).log_error.abs() for how in (False, True))
    assert carrying.max() < 0.1 < plain.median()
    rows = validate.banded(found, fitted, held_out, validate.band(fitted, MODEL, True), True)
    assert rows.inside.mean() > 0.9


def test_errors_that_are_chance_are_seldom_carried_over():
    """They would be in half of the tables if they did no harm; of these, in two of ten."""
    tables = (jumping((4, 8, 16), seed, shared=False) for seed in range(10))
    assert sum(validate.carries(table, MODEL) for table in tables) <= 3


def test_an_error_is_carried_from_the_most_ranks_and_not_beyond_the_sizes():
    known = fit.shaped(times((4, 16), 0, 0, (1e3, 1e5)), MODEL).assign(log_error=[0.1, 0.2, 0.3, 0.5])
    asked = fit.shaped(times((8, 64), 0, 0, (1e3, 1e4, 1e6)), MODEL)
    assert validate.carried(known, asked) == pytest.approx([0.2, 0.275, 0, 0.3, 0.4, 0])
    assert validate.carried(known, asked.assign(collective="all_reduce")).tolist() == [0] * 6
    assert validate.carries(times((4,), 0.1, 0), MODEL) is False


def test_an_all_to_alls_error_is_that_of_the_bytes_to_each_rank():
    table = fit.shaped(times((4, 16), 0, 0, (1e3,)), MODEL).assign(collective="all_to_all", nbytes=[4000, 16000])
    known, asked = table[:1].assign(log_error=0.25), table[1:]
    assert validate.carried(known, asked) == pytest.approx([0.25])


def test_scatter_is_the_noise_and_not_the_curve():
    dense = np.geomspace(1e3, 1e8, 60)
    quiet, noisy = (validate.scatter(times((4,), noise, 0, dense)).abs().median() for noise in (0, 0.2))
    assert quiet < 0.01 and 0.1 < noisy < 0.3
    assert validate.scatter(times((4,), 0.2, 0, np.geomspace(1e3, 1e8, 6))).empty  # too far apart to tell
