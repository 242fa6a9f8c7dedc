"""A mistake in a YAML is told by file, key, finding and allowed values, before any job starts."""

import pytest
import yaml

from repro import experiments
from repro.plan import config


def edit(path, change):
    document = yaml.safe_load(path.read_text())
    change(document)
    path.write_text(yaml.safe_dump(document))


def first_grid(document):
    experiment = document["experiments"]["exflow_placement"]["tiers"]["laptop"]
    return experiment[0]


MISTAKES = {
    "top-level key": (lambda d: d.update(teir="laptop"), ["config.yaml", "teir", "known keys", "tier"]),
    "tier value": (lambda d: d.update(tier="laptp"), ["config.yaml", "tier", "'laptp'", "'laptop'"]),
    "grid key": (lambda d: first_grid(d).update(repeat=2), ["config.yaml", "repeat", "known keys", "repeats"]),
    "grid type": (lambda d: first_grid(d).update(repeats="many"), ["config.yaml", "repeats", "'many'", "int"]),
    "point key": (
        lambda d: first_grid(d)["grid"].update(gpu=4),
        ["config.yaml", "exflow_placement", "gpu", "known keys", "gpus"],
    ),
    "point value": (lambda d: first_grid(d)["grid"].update(method=["affinty"]), ["method", "'affinty'", "'affinity'"]),
    "experiment name": (
        lambda d: d["experiments"].update(zero_trian={"tiers": {}}),
        ["zero_trian", "allowed", "zero_train"],
    ),
    "empty list": (
        lambda d: first_grid(d)["grid"].update(gpus=[]),
        ["laptop.0.grid", "gpus", "empty list", "at least one"],
    ),
    "uneven experts": (lambda d: first_grid(d)["grid"].update(gpus=[5]), ["laptop.0.grid", "gpus is 5", "16, 32"]),
    "not a number": (lambda d: first_grid(d)["grid"].update(time_limit_s=float("inf")), ["time_limit_s", "inf"]),
    "tier key": (
        lambda d: d["experiments"]["zero_train"]["tiers"].update(smok=[]),
        ["experiments.zero_train.tiers.smok", "allowed keys: 'smoke', 'laptop'"],
    ),
    "shipped records": (lambda d: d.update(reference="nothere"), ["reference", "'nothere'", "laptop-2core"]),
    "platform": (lambda d: d.update(platform="laptpo"), ["config.yaml", "platform", "'laptpo'", "laptop"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_explained(project, name):
    change, words = MISTAKES[name]
    edit(project / "config/config.yaml", change)
    with pytest.raises(config.ConfigError) as error:
        config.load()
    assert [word for word in words if word not in str(error.value)] == []


def test_platform_file_is_checked(project):
    edit(project / "config/platforms/laptop.yaml", lambda d: d.update(nodes=4))
    with pytest.raises(config.ConfigError, match=r"laptop\.yaml: nodes: .*known keys: description, tier"):
        config.load()


def test_key_given_twice_is_an_error(project):
    path = project / "config/config.yaml"
    path.write_text(path.read_text() + "\nplatform: laptop\n")
    with pytest.raises(config.ConfigError, match="key given twice: platform"):
        config.load()


def test_broken_yaml_names_the_file(project):
    (project / "config/config.yaml").write_text("experiments: [")
    with pytest.raises(config.ConfigError, match=r"config\.yaml: not valid YAML"):
        config.load()


def test_unknown_tier_argument(project):
    with pytest.raises(config.ConfigError, match="--tier: found 'tiny'; allowed: smoke, laptop, gpu"):
        config.load(tier="tiny")
    with pytest.raises(config.ConfigError, match="--platform: found 'fronter'; allowed: a100"):
        config.load(platform="fronter")


def test_grid_is_a_product():
    grid = config.Grid(grid={"method": ["contiguous", "random"], "gpus": [2, 4], "seed": 3})
    points = config.points("exflow_placement", grid, "here")
    assert {(p.method, p.gpus, p.seed) for p in points} == {(m, g, 3) for m in ("contiguous", "random") for g in (2, 4)}


def test_every_experiment_is_configured():
    settings, _ = config.load()
    assert set(settings.experiments) == set(experiments.names())
