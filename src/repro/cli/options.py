"""Options that several commands have: KEY=VALUE pairs, and the folder that records are read from."""

from collections.abc import Container
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from repro import paths
from repro.plan import config

Results = Annotated[Path | None, typer.Option(help="Folder of records; default: the platform's, else the reference.")]


def settings(pairs: list[str], texts: Container[str] = ()) -> dict[str, Any]:
    """Values of KEY=VALUE, read as YAML except those of `texts`, which stay as written ("25" is no number there)."""
    values = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"--set {pair}: expected key=value")
        try:
            values[key] = yaml.safe_load(text) if text and key not in texts else text
        except yaml.YAMLError as error:
            raise ValueError(f"--set {pair}: the value is not valid YAML: {error}") from error
    return values


def results_folder(results: Path | None, shipped: bool = True) -> Path:
    """Folder with the records: the one given, else this machine's, else the shipped ones where `shipped` allows it."""
    if results is not None:
        if not results.is_dir():
            raise FileNotFoundError(f"--results {results}: no such folder")
        return results
    configured, platform = config.load()
    own = paths.root() / config.results_folder(configured, platform)
    if (own / "records").exists():
        return own
    if not shipped:
        raise FileNotFoundError(
            f"{own}: no records yet; run `snakemake`, `snakemake replot`, or give --results and --out"
        )
    return paths.root() / "results/reference" / configured.reference


def records_folder(folder: Path) -> Path:
    """`folder` may be the results folder or the folder of records itself."""
    return (folder / "records" if (folder / "records").is_dir() else folder).absolute()
