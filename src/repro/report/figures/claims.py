"""Every claim of the papers beside our numbers; the story is `notebooks/claims.ipynb`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas.io.formats.style import Styler

from repro.claims import registry
from repro.claims.claim import KIND, Claim
from repro.claims.registry import Verdict
from repro.claims.verdict import AGREEMENT, SCOPE
from repro.records.record import Evidence
from repro.report.docs.table import stated
from repro.report.figures import marks, name_of
from repro.report.figures.base import MARKERS, PALETTE, Drawing
from repro.report.figures.data import Data, NothingToShow, collect

_KINDS = get_args(Evidence)


def meanings() -> Styler:
    """What the words of a verdict mean, by axis, for reading."""
    axes = {"agreement": AGREEMENT, "setting": SCOPE, "kind of row": KIND}
    rows = [(axis, word, meaning) for axis, words in axes.items() for word, meaning in words.items()]
    style = pd.DataFrame(rows, columns=["axis", "word", "meaning"]).style.set_uuid("words").hide(axis="index")
    return style.set_properties(**{"white-space": "normal", "text-align": "left"})


def _judge(records: str | Path) -> tuple[dict[str, Claim], list[Verdict]]:
    """Claims by id, and the verdict of each on a folder of records, in the same order."""
    found, claims = collect(records), registry.load()
    return {claim.id: claim for claim in claims}, registry.evaluate(claims, found.records, found.problems)


def verdicts(records: str | Path) -> pd.DataFrame:
    """A row per claim: fields of `Verdict`, `about` (title of the paper), and as texts what is `stated` and our number."""
    claims, judged = _judge(records)
    titles = {paper.id: name_of(paper) for paper in registry.papers().values()}
    rows = []
    for verdict in judged:
        texts = {"stated": stated(claims[verdict.id]), "our_text": registry.numbers(verdict)[1]}
        rows.append(verdict.model_dump() | texts | {"about": titles[claims[verdict.id].paper]})
    return pd.DataFrame(rows)


def styled(table: pd.DataFrame) -> Styler:
    """A table of verdicts for reading: column `agreement` in bold or grey, long texts wrapped."""
    grey, bold = "color: #666", "font-weight: bold"
    look = dict.fromkeys(("inconclusive", "skipped", "not run"), grey)
    look |= {"reproduced": bold, "deviates": f"{bold}; font-style: italic"}
    cells = {"white-space": "normal", "text-align": "left", "vertical-align": "top", "font-size": "12px"}
    rules = [
        {"selector": "th", "props": "text-align: left; font-size: 12px"},
        {"selector": "tr", "props": "border-bottom: 1px solid #ddd"},
    ]
    style = table.style.set_uuid("claims").hide(axis="index").set_properties(**cells).set_table_styles(rules)
    style = style.format(escape="html")  # a record's detail may hold any text
    style = style.set_properties(subset=["claim", "agreement"], **{"white-space": "nowrap"})
    style = style.set_properties(subset=["what the paper says", "reason"], **{"min-width": "18em"})
    style = style.set_caption(registry.older_code(table.ours))
    return style.map(lambda word: look.get(word, ""), subset=["agreement"])


def claims_overview(data: Data, *, ids: str = "", primary: bool = False) -> Drawing:
    """Our value over the paper's for every claim with a published number, with the band that agrees with the claim.
    `ids`: only claims whose id begins so, e.g. `ZT` or `EX-F8`; `primary`: only primary ones."""
    claims, judged = _judge(data.folder)
    if not any(claim.startswith(ids) for claim in claims):
        raise NothingToShow(f"ids: found {ids!r}; allowed: beginnings of ids, such as {', '.join(registry.papers())}.")
    judged = [verdict for verdict in judged if verdict.id.startswith(ids) and (verdict.primary or not primary)]
    rows = [verdict for verdict in judged if verdict.value is not None and verdict.paper_value]
    if not rows:
        raise NothingToShow(
            "No record answers a claim that has a published number. "
            "Run `make reproduce`, or point `records` at a folder of records."
        )
    told = [verdict for verdict in judged if verdict.value is not None]
    evidence = ", ".join(kind for kind in _KINDS if kind in {verdict.evidence for verdict in rows})
    absent = {
        "on an ordering": sum(verdict.paper_value is None for verdict in told),
        "on errors (the paper's value is 0)": sum(verdict.paper_value == 0 for verdict in told),
        **Counter(verdict.agreement for verdict in judged if verdict.value is None),
    }
    left_out = ", ".join(f"{count} {words}" for words, count in absent.items() if count)
    caption = f"{len(rows)} rows" + (f". Not drawn: {left_out}. " if left_out else ". ")
    of_papers = {verdict.id.split("-")[0] for verdict in rows}
    known = {prefix: name_of(paper) for prefix, paper in registry.papers().items() if prefix in of_papers}
    caption += ", ".join(f"{prefix}: {name}" for prefix, name in known.items()) + ". "
    caption += "Large marks: our value, filled where a claim is reproduced. Small dots: single runs, or pairs of "
    caption += "runs. Bars with ends: 95 % intervals over runs, seeds or token sequences, where there are enough of "
    caption += "them; for modelled values, 95 % of the draws of what is uncertain. Grey area: values that agree "
    caption += "with the claim. "
    runs = {record for row in rows for record in row.records}
    caption += f"The values rest on {len(runs)} runs. "
    if any(row.kind != "claim" for row in rows):
        caption += "Grey words: rows that are not claims. They check our own code or models, ask what a paper leaves "
        caption += "out, or repeat a claim with another choice."
    marked = registry.older_code(registry.numbers(row)[1] for row in rows)
    return Drawing(_overview(rows, claims), evidence, f"{caption} {marked}.".strip() if marked else caption.strip())


def _overview(rows: Sequence[Verdict], claims: Mapping[str, Claim]) -> Figure:
    """One row a claim, the first at the top."""
    drawn = [x / row.paper_value for row in rows for x in (row.value, *(row.interval or ()))]
    positive = [x for x in drawn if x > 0]
    left, right = min([0.4, *(x / 1.4 for x in positive)]), max([2.5, *(x * 1.4 for x in positive)])
    fig, axes = plt.subplots(figsize=(9, 1.5 + (0.29 if len(rows) < 20 else 0.215) * len(rows)))
    axes.set_xlim(left, right)
    marks.log_axis(axes.xaxis, marks.round_ticks(left, right))
    marks.rows(axes, [f"{claims[row.id].title}   {row.id}" for row in rows], fontsize=8)
    for y, (row, before) in enumerate(zip(rows, [rows[0], *rows], strict=False)):
        if row.id.split("-")[0] != before.id.split("-")[0]:
            axes.axhline(y - 0.5, color="#8c8c8c", linewidth=0.8)  # between papers
        _row(axes, y, row, claims[row.id].band, left, right)
    axes.axvline(1, color="black", linewidth=1, linestyle="--", zorder=2)
    axes.set_xlabel("our value ÷ the paper's (log scale)")
    for kind, marker, color in zip(_KINDS, MARKERS, PALETTE, strict=False):
        if kind in {row.evidence for row in rows}:
            axes.plot([], [], linestyle="none", marker=marker, color=color, markerfacecolor="white", label=kind)
    axes.plot([], [], linestyle="none", marker="o", color="black", label="claim reproduced (filled)")
    fig.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=8.5)
    return fig


def _row(axes: Axes, y: int, row: Verdict, band: tuple[float, float], left: float, right: float) -> None:
    """The band that agrees with a claim, our value with its interval, and the verdict at the right edge."""
    low, high = np.clip(sorted(end / row.paper_value for end in band), left, right)
    grey = {"color": "#d9d9d9", "edgecolor": "#8c8c8c", "linewidth": 0.6, "zorder": 1}
    axes.barh(y, high - low, left=low, height=0.66, label="agrees with the claim" if y == 0 else None, **grey)
    kind = _KINDS.index(row.evidence)
    style: dict[str, Any] = {"marker": MARKERS[kind], "color": PALETTE[kind], "markersize": 6.5, "zorder": 4}
    style["markerfacecolor"] = PALETTE[kind] if row.agreement == "reproduced" and row.kind == "claim" else "white"
    x = row.value / row.paper_value
    if x <= 0:  # the other sign has no place on a logarithmic axis
        marks.note(axes, "of the other sign", left, y, 6, va="center")
        style["marker"] = "<"
    marks_of_runs = [value / row.paper_value for value in row.values if value / row.paper_value > left]
    axes.plot(marks_of_runs, [y] * len(marks_of_runs), ".", color="#555555", markersize=3.5, zorder=5)
    if x > 0 and row.interval:
        ends = sorted(max(end / row.paper_value, left) for end in row.interval)
        axes.plot(ends, [y, y], color="black", linewidth=1.4, marker="|", markersize=6, zorder=3)
    axes.plot(max(x, left), y, linestyle="none", **style)
    look = {"reproduced": {"fontweight": "bold"}, "deviates": {"fontstyle": "italic"}}.get(row.agreement, {})
    words = row.agreement + (registry.OLDER if row.older_code else "")
    if row.kind != "claim":
        look, words = {"color": "#777777"}, f"{words} ({row.kind})"
    axes.text(1.01, y, words, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5, **look)
