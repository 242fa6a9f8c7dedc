"""What a probe leaves can be fitted again, as docs/scaling.md says."""

import re
from datetime import UTC, datetime

import numpy as np
import pytest

from repro import experiments, paths, scaling
from repro.records import record
from repro.records.record import Provenance, Record
from repro.scaling import fit, measured_files

pytestmark = pytest.mark.xdist_group("network")


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """The path of a record of two ranks on two nodes, and its metrics."""
    experiment = experiments.get("fabric_probe")
    point = experiment.parameters(nodes=2, packages=1, gcds=1, largest_kib=64, repeats=1, fabric="unshaped")
    outcome = experiment.run(point)
    path = tmp_path_factory.mktemp("records") / "probe.json"
    made = Record(
        experiment="fabric_probe",
        point=point.model_dump(),
        repeat=0,
        seed=0,
        evidence=outcome.evidence,
        status="ok",
        metrics={"error_median": {"value": outcome.metrics.error_median, "unit": "1"}},
        provenance=Provenance(start=datetime.now(UTC), end=datetime.now(UTC)),
    )
    record.write(made, path, outcome.series)
    return path, outcome.metrics


def test_a_rank_alone_has_no_link_to_probe():
    with pytest.raises(ValueError, match="no link to probe"):
        experiments.get("fabric_probe").parameters(nodes=1, packages=1, gcds=1)


def test_the_model_of_the_documentation_fits_the_record_of_a_probe(probed):
    """Its network predicts more nodes."""
    path, _ = probed
    text = (paths.root() / "docs/scaling.md").read_text()
    (model,) = re.findall(r'`(fit\.Model\(\("package".*?)`', text)
    table = measured_files.read_probe(path)
    assert set(table.sizes) == {(1, 1, 2)} and set(table.hop) == {("cluster",)}
    network = fit.fit(table, eval(model)).network(1, 1, 48, draws=8)
    seconds = scaling.seconds("all_gather", 2**20, network, "ring")
    assert seconds.shape == (8,) and np.isfinite(seconds).all() and (seconds > 0).all()


def test_the_rows_that_the_probe_fitted_give_its_metrics_again(probed):
    path, metrics = probed
    table = measured_files.read_probe(path)
    model = fit.Model(
        ("package", "node", "cluster"), algorithms={"ring": ("ring",), "direct": ("direct",)}, reduces=True, host=True
    )
    values = fit.fit(table[table.fitted], model).values()
    assert values["cluster.bytes_per_s.0"] == pytest.approx(metrics.cluster_bytes_per_s, rel=1e-6)
    assert values["host_bytes_per_s"] == pytest.approx(metrics.host_bytes_per_s, rel=1e-6)
