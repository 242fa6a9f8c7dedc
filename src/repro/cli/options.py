"""The folder that records are read from: an option that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from repro import paths

Results = Annotated[Path | None, typer.Option(help="Folder of records; default: the platform's, else the reference.")]


def results_folder(results: Path | None, shipped: bool = True) -> Path:
    """Folder with the records: the one given, else this machine's, else the shipped ones where `shipped` allows it."""
    if results is not None:
        if not results.is_dir():
            raise FileNotFoundError(f"--results {results}: no such folder")
        return results
    from repro.plan import config  # with pydantic and YAML: only where it is asked

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
