"""Which code made figures, verdicts and the report: the workflow makes them again when it changes."""

from pathlib import Path

from repro.records import provenance
from repro.report import figures


def source_hash() -> str:
    """Hash of all of `repro.report` with what it uses, of the catalogue of figures, and of the page's template."""
    folder = Path(__file__).parent
    files = provenance.file_hash(figures.CATALOGUE, folder / "report.html.j2")
    return f"{provenance.source_hash('repro.report')}-{files}"
