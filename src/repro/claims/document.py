"""`config/claims.yaml` as it is written, and the whole claims that it stands for.

A claim of the file says what is its own. The rest comes from its group, a scope by name, and its paper.
"""

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from repro import paths
from repro.claims.claim import PRIMARY, Claim, Published, Scope
from repro.plan import config
from repro.records.record import Strict

_ID = re.compile(r"[A-Z]+-[A-Z0-9]+[a-z]?(\.[a-z])?")
_ID_IN_WORDS = (
    "the prefix of a paper ({}), a dash, and a row of capitals and digits that may end in a small letter;"
    " then, for one of several claims of the row, a dot and a small letter: FL-F4a.b"
)


class Paper(Strict):
    """A paper.

    published   a CSV file with the numbers of its figures, relative to the root
    in_short    what came out, in three sentences; ids of its claims in braces stand for our numbers of them
    """

    title: str
    id: str
    version: str
    published: str = ""
    in_short: str = ""

    @property
    def pieces(self) -> list[str]:
        """`in_short` as texts and ids of claims in turn, first a text."""
        return re.split(r"\{(.*?)\}", self.in_short)


class Group(BaseModel, extra="allow"):
    """Claims by id. All other keys are fields of `Claim` that they share; what a claim says itself comes first."""

    claims: dict[str, dict[str, Any]]


class Document(Strict):
    """`config/claims.yaml`: papers by the prefix of their claims, scopes by name, groups of claims."""

    papers: dict[str, Paper]
    scopes: dict[str, Scope] = Field(default_factory=dict)
    groups: dict[str, Group]


def read(path: Path) -> list[Claim]:
    """All claims: rows in the order of the file, the claims of a row by their letter. ConfigError for what is wrong."""
    document = config.load_yaml(path, Document)
    published = {prefix: _published(paper) for prefix, paper in document.papers.items()}
    claims: dict[str, Claim] = {}
    for name, group in document.groups.items():
        shared = group.model_extra or {}
        if unknown := ", ".join(shared.keys() - Claim.model_fields.keys()):
            known = ", ".join(["claims", *Claim.model_fields])
            raise config.ConfigError(f"{path}: groups.{name}: found {unknown}; known keys: {known}")
        for claim_id, own in group.claims.items():
            prefix = claim_id.split("-")[0]
            if not _ID.fullmatch(claim_id) or prefix not in document.papers:
                form = _ID_IN_WORDS.format(", ".join(document.papers))
                raise config.ConfigError(f"{path}: groups.{name}.claims: found {claim_id!r}; allowed: {form}")
            if claim_id in claims:
                raise config.ConfigError(f"{path}: groups.{name}.claims: {claim_id} is given twice")
            paper = document.papers[prefix]
            fields = {"id": claim_id, "paper": paper.id, "published": published[prefix].pop(claim_id, [])}
            written = filled(own, shared)
            if taken := ", ".join(fields.keys() & written.keys()):
                raise config.ConfigError(f"{path}: {claim_id}: found {taken}; allowed: any other key, papers has these")
            fields |= {"version": paper.version} | written
            claims[claim_id] = _whole(fields, document.scopes, f"{path}: {claim_id}")
    for prefix, others in published.items():
        if others:
            where = document.papers[prefix].published
            raise config.ConfigError(f"{where}: claim: found {', '.join(others)}; allowed: ids of {path}")
    for prefix, paper in document.papers.items():
        if unknown := ", ".join(name for name in paper.pieces[1::2] if name not in claims):
            raise config.ConfigError(f"{path}: papers.{prefix}.in_short: found {unknown}; allowed: ids of claims")
        first = [claim.id for claim in claims.values() if claim.primary and claim.paper == paper.id]
        if len(first) > PRIMARY:
            found = ", ".join(first)
            raise config.ConfigError(f"{path}: papers.{prefix}: primary claims: found {found}; allowed: {PRIMARY}")
    rows = list(dict.fromkeys(claim.base for claim in claims.values()))
    return sorted(claims.values(), key=lambda claim: (rows.index(claim.base), claim.id))


def filled(own: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """`own`, then the keys that only `shared` has; `value`, and `where` in it, are filled up in the same way."""
    inner = {
        key: filled(own[key], shared[key])
        for key in ("value", "where")
        if isinstance(own.get(key), dict) and isinstance(shared.get(key), dict)
    }
    return own | shared | own | inner  # first for the order of keys, then for their values


def _whole(fields: dict[str, Any], scopes: Mapping[str, Scope], where: str) -> Claim:
    """The claim of these fields, its scope looked up. `where` names file and claim for errors."""
    scope = fields.get("scope")
    if isinstance(scope, str):
        if scope not in scopes:
            known = ", ".join(scopes)
            raise config.ConfigError(f"{where}: scope: found {scope!r}; allowed: {known}, or a scope of its own")
        fields["scope"] = scopes[scope]
    try:
        return Claim.model_validate(fields)
    except ValidationError as error:
        raise config.ConfigError(config.explain(error, Claim, where)) from error


def _published(paper: Paper) -> dict[str, list[Published]]:
    """Published numbers by claim, in the order of the paper's CSV file."""
    if not paper.published:
        return {}
    path = paths.root() / paper.published
    found: dict[str, list[Published]] = {}
    try:
        for row in csv.DictReader(path.read_text("utf-8").splitlines()):
            claim_id = row.pop("claim", "")
            given = {name: text for name, text in row.items() if text}
            found.setdefault(claim_id, []).append(Published.model_validate(given))
    except OSError as error:
        raise config.ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise config.ConfigError(f"{path}: found no UTF-8: {error}") from error
    except csv.Error as error:
        raise config.ConfigError(f"{path}: found no CSV: {error}") from error
    except ValidationError as error:
        raise config.ConfigError(config.explain(error, Published, f"{path}: {claim_id}: {given}")) from error
    return found
