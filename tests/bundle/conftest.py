"""A bundle of a small checkout, and that bundle unpacked elsewhere."""

from pathlib import Path

import pytest
import small_checkout

from repro.bundle import contents, unpack


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout") / "repro"
    small_checkout.build(folder)
    return folder


@pytest.fixture(scope="session")
def bundle(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPRO_ROOT", str(checkout))
        return contents.make(checkout / "results/replot", tmp_path_factory.mktemp("bundle") / "bundle.tar").path


@pytest.fixture(scope="session")
def elsewhere(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(bundle, tmp_path_factory.mktemp("elsewhere")).folder


@pytest.fixture
def here(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkout, as the one in which commands work."""
    monkeypatch.setenv("REPRO_ROOT", str(checkout))
    monkeypatch.chdir(checkout)
    return checkout
