"""constraints.txt, requirements.lock, environment.yml, pyproject.toml and the installed packages tell the same story."""

import ast
import importlib.metadata
import re
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from rattler import MatchSpec

from repro import paths


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    lines = [
        line
        for line in (paths.root() / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    return {normal(name): version for name, version in (line.split("==") for line in lines)}


@pytest.fixture(scope="module")
def conda() -> list:
    return yaml.safe_load((paths.root() / "environment.yml").read_text())["dependencies"]


@pytest.fixture(scope="module")
def direct() -> set[str]:
    project = tomllib.loads((paths.root() / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [item for extra in project["optional-dependencies"].values() for item in extra]
    return {normal(Requirement(item).name) for item in wanted} - {project["name"]}  # extras that name other extras


def test_the_lock_has_hashes_of_every_pinned_version_but_torch(pins):
    entries = (paths.root() / "requirements.lock").read_text().replace("\\\n", " ").splitlines()
    locked = [entry.split() for entry in entries if entry and not entry.startswith("#")]
    assert all(part.startswith("--hash=sha256:") for _, *hashes in locked for part in hashes)
    assert all(hashes for _, *hashes in locked)
    found = {normal(name): version for name, version in (pin.split("==") for pin, *_ in locked)}
    assert found == {name: version for name, version in pins.items() if name != "torch"}


def test_conda_has_the_pinned_version_of_every_direct_dependency(pins, conda, direct):
    (pip,) = (item["pip"] for item in conda if isinstance(item, dict))
    assert {normal(name): version for name, version in (item.split("==") for item in pip)} == {
        name: pins[name] for name in direct
    }


def test_conda_specs_are_valid(conda):
    for item in conda:
        if isinstance(item, str):
            MatchSpec(item, strict=True)


def test_installed_versions_are_the_pinned_ones(pins):
    """Otherwise this test run says nothing about the versions that users get."""
    wrong = {}
    for name, version in pins.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a platform's own helper package
        if Version(installed).public != version:
            wrong[name] = (installed, version)
    assert wrong == {}


def test_every_imported_package_is_a_dependency(direct):
    """Tests run in an environment that may hold more than a user's."""
    imported = set()
    servers = (
        paths.root() / "src/repro/experiments/flover_peers/engines"
    )  # programs of .peers, an environment of its own
    for path in (paths.root() / "src").rglob("*.py"):
        if path.parent == servers:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.split(".")[0])
    packages = importlib.metadata.packages_distributions()
    foreign = imported - sys.stdlib_module_names - {"repro", "triton"}  # torch's GPU builds bring Triton
    # a package of an extra that is not installed must at least be called as it is imported
    assert {name for name in foreign if direct.isdisjoint(map(normal, packages.get(name, [name])))} == set()


def test_make_installs_the_pinned_torch(pins):
    """By a version of its own: the lock leaves torch out, as TORCH_INDEX chooses the build."""
    assert set(re.findall(r"torch==([\d.]+)", (paths.root() / "Makefile").read_text())) == {pins["torch"]}


def test_tests_of_a_file_share_a_process(request):
    """And its fixtures: pytest-xdist sends tests where their group says, which it keeps in a private field of pytest's."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("one process runs all")
    assert request.node.nodeid.endswith("@tests/test_environment.py")
