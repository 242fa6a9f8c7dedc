"""Calibration finds how much slower the processors are than they were probed, and leaves links alone."""

from dataclasses import replace

import pytest

from repro import scaling
from repro.experiments.zero_train import ZeroTrain
from repro.scaling import network
from repro.scaling.machines import Machine
from repro.scaling.network import network_of
from repro.zero import plan

TRUE = {"message": 2.0, "bytes": 1.5, "memory": 4.0}


def machine(rate):
    topology = ZeroTrain(cluster_mbit_s=rate).topology
    links = network_of(topology).links
    protocols = [tuple(network.Protocol(2e-3, p.bytes_per_s) for p in level.protocols) for level in links]
    links = tuple(network.Links(level.count, p) for level, p in zip(links, protocols, strict=True))
    work = network.Network(topology, links, overhead_s=1e-3, peer_s=1e-4, reduce_bytes_per_s=5e8, host_bytes_per_s=4e8)
    return Machine(work, 1e12, 3e9, 0.0, 0.0, quantize_values_per_s=1e8, native=False)


def observations(rate, names, factors=TRUE):
    probed, found = machine(rate), []
    for name in names:
        chosen, config = plan.named(name, probed.topology), ZeroTrain().gpt
        real = scaling.predict_step(chosen, config, scaling.slowed(probed, factors), compute_s=0.05).seconds
        found.append(scaling.Observation(chosen, config, probed, float(real), compute_s=0.05))
    return found


def test_three_plans_at_one_rate_predict_the_others_at_all():
    """Fast links, so that the processors decide. Steps tell the sum of the factors' work better than each of them."""
    factors = scaling.calibrate(observations(400, ("ddp", "zero3", "hierarchical")))
    assert all(factors[name] > 1.2 for name in ("message", "bytes", "memory"))
    bare = dict.fromkeys(TRUE, 1.0)
    for rate in (100, 400, 1600):
        for one in observations(rate, ("hpz", "zeropp", "mics", "hierarchical_fp")):
            assert one.predicted(factors) == pytest.approx(one.seconds, rel=0.1)
            assert one.predicted(bare) < 0.85 * one.seconds


def test_what_the_data_do_not_say_stays_as_probed():
    """On slow links the processors' work hides: it is not made up."""
    factors = scaling.calibrate(observations(0.5, ("zero3",)))
    assert factors["message"] == pytest.approx(1, rel=0.3) and factors["bytes"] == pytest.approx(1, rel=0.3)


def test_links_keep_their_rates():
    probed = machine(25)
    slower = scaling.slowed(probed, TRUE)
    for before, after in zip(probed.network.links, slower.network.links, strict=True):
        assert after.protocols[0].bytes_per_s == before.protocols[0].bytes_per_s
        assert after.protocols[0].latency_s == 2 * before.protocols[0].latency_s
    assert (slower.network.overhead_s, slower.network.peer_s) == (2e-3, 2e-4)
    assert slower.quantize_values_per_s == probed.quantize_values_per_s / 1.5
    with pytest.raises(ValueError, match="no observations"):
        scaling.calibrate([])


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_step_that_took_no_time_is_refused(seconds):
    (good,) = observations(25, ["zero3"])
    with pytest.raises(ValueError, match=f"step of zero3: seconds is {seconds}, allowed: above 0"):
        replace(good, seconds=seconds)
