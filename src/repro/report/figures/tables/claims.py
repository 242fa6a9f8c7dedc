"""Tables of the notebook on claims: the tally, every verdict, and the records behind each."""

import pandas as pd
from pandas.io.formats.style import Styler

from repro.claims import registry
from repro.report.figures import claims
from repro.report.figures.data import Data

_COLUMNS = {  # of `claims.verdicts`: heading
    "id": "claim",
    "agreement": "agreement",
    "scope": "setting",
    "claim": "what the paper says",
    "stated": "paper, and tolerance",
    "our_text": "ours",
    "evidence": "evidence",
    "reason": "reason",
}


def tally(data: Data) -> pd.DataFrame:
    """How many claims of each paper have which agreement."""
    table = claims.verdicts(data.folder)
    counted = table[table.kind == "claim"]
    return pd.crosstab(counted.about, counted.agreement).reindex(columns=registry.WORDS, fill_value=0)


def verdicts(data: Data) -> Styler:
    """Every claim with its verdict."""
    table = claims.verdicts(data.folder)
    return claims.styled(table[list(_COLUMNS)].set_axis(_COLUMNS.values(), axis=1).fillna({"evidence": "–"}))


def sources(data: Data) -> pd.DataFrame:
    """How many records each verdict rests on, by experiment, and the first of them."""
    table = claims.verdicts(data.folder)[["id", "evidence", "records"]].explode("records").dropna(subset="records")
    paths = table.records.astype(str).str.split("/")
    by_claim = table.assign(experiment=paths.str[-2], file=paths.str[-1]).groupby(
        ["id", "evidence", "experiment"], dropna=False, sort=False
    )
    return by_claim.file.agg(**{"records": "count", "first of them": "first"}).reset_index()
