"""CITATION.cff agrees with what else says the same, and the other catalogues' files say what it says."""

import tomllib

import pytest

import repro
from repro import paths
from repro.claims import registry
from repro.report.docs import citation


@pytest.fixture(scope="module")
def cited():
    return citation.read()


def test_version_and_licence_are_those_of_the_package(cited):
    project = tomllib.loads((paths.root() / "pyproject.toml").read_text())["project"]
    assert cited["version"] == project["version"] == repro.__version__
    assert cited["license"] == project["license"]


def test_it_names_the_papers_that_are_claimed_about(cited):
    claimed = {claim.paper for claim in registry.load() if claim.kind == "claim"}
    titles = {paper.id: paper.title for paper in registry.papers().values()}
    named = {citation.arxiv(paper): paper["title"] for paper in cited["references"]}
    assert named.keys() == claimed
    assert [title for number, title in named.items() if not titles[number].startswith(title)] == []


def test_persons_and_groups_in_the_words_of_each_catalogue(cited):
    person = {"given-names": "Ada", "family-names": "Lovelace"}
    mixed = cited | {"authors": [{"name": "A group"}, person]}
    expected = [{"type": "Organization", "name": "A group"}]
    expected += [{"type": "Person", "givenName": "Ada", "familyName": "Lovelace"}]
    assert citation.codemeta(mixed)["author"] == expected
    assert citation.zenodo(mixed)["creators"] == [{"name": "A group"}, {"name": "Lovelace, Ada"}]


def test_a_paper_without_its_number_is_named():
    with pytest.raises(ValueError, match=r"CITATION.cff: references: X: found no identifier that begins with arXiv:"):
        citation.arxiv({"title": "X", "identifiers": [{"type": "other", "value": "isbn:1"}]})
