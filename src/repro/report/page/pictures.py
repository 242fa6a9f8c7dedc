"""The figures of a page: small enough to lie in it, with captions and alternative texts in words."""

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from repro import files
from repro.claims import registry
from repro.report import figures
from repro.report.docs.table import Row

_COLOURS = 128  # of a picture, of which some are shades of the edges of letters


@dataclass(frozen=True)
class Picture:
    """A drawn figure. `source`: a data URI. `answer`: what its caption says, its evidence and its runs."""

    name: str
    asks: str
    source: str
    width: int
    height: int
    alt: str
    answer: str


def load(folder: Path, name: str, rows: Sequence[Row]) -> Picture | None:
    """Figure `name` (with `shipped/` before it: of the shipped records) as `folder` has it; None where it has none.

    `rows`: the claims that it shows, for its alternative text. ValueError where the picture or its texts cannot be read."""
    path = folder / f"{name}.png"
    if not path.is_file():
        return None
    asks = figures.entry(Path(name).name).asks
    try:
        source, (width, height) = _embedded(path)
    except (OSError, SyntaxError) as error:  # Pillow raises both on a file that was cut
        raise ValueError(f"{path}: no picture: draw it again with `repro figure {Path(name).name}`") from error
    answer = _answer(path.with_suffix(".json"))
    values = [f"{row.claim.title}: {value(row)}." for row in rows]
    alt = " ".join(filter(None, [asks or "Figure.", answer, *values]))
    return Picture(name, asks, source, width, height, alt, answer)


def value(row: Row) -> str:
    """`paper 1.71 ×, ours 1.5 × [1.4, 1.6], consistent, scaled down, emulated`, without what is not there."""
    paper = "" if row.claim.paper_value is None else f"{registry.whose(row.verdict)} {row.paper}"
    ours = "" if row.verdict.value is None else f"ours {row.here}"
    return ", ".join(filter(None, [paper, ours, row.judged]))


def _answer(path: Path) -> str:
    """The texts that were saved beside a picture, as sentences; a picture without such has none."""
    if not path.is_file():
        return ""
    try:
        texts = json.loads(files.read(path))
        return " ".join(filter(None, [f"Evidence: {texts['evidence']}.", texts["caption"], texts["n"]]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no texts of a figure (evidence, caption, n): draw it again") from error


def _embedded(path: Path) -> tuple[str, tuple[int, int]]:
    """A picture as data URI, and its size in pixels: a quarter of the PNG's bytes at the same sharpness."""
    with Image.open(io.BytesIO(files.read(path))) as picture:
        # Maximum coverage: by the median cut a rare colour, such as a line's, comes out as another.
        fewer = (
            picture.convert("RGB")
            .quantize(_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            .convert("RGB")
        )
    kept = io.BytesIO()
    fewer.save(kept, format="WEBP", lossless=True, method=4, quality=100)  # of lossless: effort
    return f"data:image/webp;base64,{base64.b64encode(kept.getvalue()).decode()}", fewer.size
