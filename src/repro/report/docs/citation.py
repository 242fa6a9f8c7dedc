"""CITATION.cff in the words of other catalogues: codemeta.json (CodeMeta 3.0) and .zenodo.json (a deposit's metadata)."""

import json
import tomllib
from typing import Any

import yaml

from repro import paths

FILE = "CITATION.cff"
_ARXIV = "arXiv:"


def read() -> dict[str, Any]:
    """CITATION.cff as it stands. OSError where it cannot be read, ValueError where it is no YAML."""
    path = paths.root() / FILE
    try:
        return yaml.safe_load(path.read_text("utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: found no YAML: {error}") from error


def pages() -> dict[str, str]:
    """codemeta.json and .zenodo.json by their paths."""
    cited = read()
    documents = {"codemeta.json": codemeta(cited), ".zenodo.json": zenodo(cited)}
    return {path: json.dumps(text, indent=2, ensure_ascii=False) + "\n" for path, text in documents.items()}


def codemeta(cited: dict[str, Any]) -> dict[str, Any]:
    """The software in CodeMeta's words; what Python it needs is pyproject.toml's."""
    project = tomllib.loads((paths.root() / "pyproject.toml").read_text("utf-8"))["project"]
    return {
        "@context": "https://w3id.org/codemeta/3.0",
        "type": "SoftwareSourceCode",
        "name": cited["title"],
        "identifier": project["name"],
        "description": cited["abstract"],
        "version": cited["version"],
        "license": license_url(cited),
        "author": [person(author) for author in cited["authors"]],
        "keywords": cited["keywords"],
        "programmingLanguage": "Python",
        "runtimePlatform": f"Python {project['requires-python']}",
        "operatingSystem": ["Linux"],
        "referencePublication": [
            {
                "type": "ScholarlyArticle",
                "name": paper["title"],
                "author": [person(author) for author in paper["authors"]],
                "datePublished": str(paper["year"]),
                "url": f"https://arxiv.org/abs/{arxiv(paper)}",
            }
            for paper in cited["references"]
        ],
    }


def zenodo(cited: dict[str, Any]) -> dict[str, Any]:
    """What Zenodo asks before it gives a DOI."""
    return {
        "upload_type": "software",
        "title": cited["title"],
        "version": cited["version"],
        "description": cited["abstract"],
        "creators": [{"name": _indexed(author)} for author in cited["authors"]],
        "license": cited["license"].lower(),
        "keywords": cited["keywords"],
        "related_identifiers": [
            {"identifier": f"{_ARXIV}{arxiv(paper)}", "relation": "references", "scheme": "arxiv"}
            for paper in cited["references"]
        ],
    }


def license_url(cited: dict[str, Any]) -> str:
    return f"https://spdx.org/licenses/{cited['license']}"


def arxiv(paper: dict[str, Any]) -> str:
    """Number of a paper. ValueError for one without."""
    for identifier in paper.get("identifiers", []):
        if identifier["value"].startswith(_ARXIV):
            return identifier["value"].removeprefix(_ARXIV)
    raise ValueError(f"{FILE}: references: {paper['title']}: found no identifier that begins with {_ARXIV}")


def person(author: dict[str, str]) -> dict[str, str]:
    """An author in schema.org's words: a person, or a group that has one name."""
    if "name" in author:
        return {"type": "Organization", "name": author["name"]}
    return {"type": "Person", "givenName": author["given-names"], "familyName": author["family-names"]}


def _indexed(author: dict[str, str]) -> str:
    return author.get("name") or f"{author['family-names']}, {author['given-names']}"
