"""Which code made figures, verdicts and the report: the workflow makes them again when it changes."""

from pathlib import Path

from repro.records import provenance


def source_hash() -> str:
    """Hash of all of `repro.report` with what it uses, and of the page's template."""
    folder = Path(__file__).parent
    parts = (path.relative_to(folder).with_suffix("").parts for path in sorted(folder.rglob("*.py")))
    modules = (".".join(("repro.report", *found)).removesuffix(".__init__") for found in parts)
    return f"{provenance.source_hash(*modules)}-{provenance.file_hash(folder / 'report.html.j2')}"
