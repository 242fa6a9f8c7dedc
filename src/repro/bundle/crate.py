"""`ro-crate-metadata.json`: what a bundle holds, and by which run, as a Workflow Run RO-Crate (profile 0.5)."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rocrate.model.contextentity import ContextEntity
from rocrate.model.entity import Entity
from rocrate.rocrate import ROCrate

from repro.records.record import Record
from repro.report.docs import citation

NAME = "ro-crate-metadata.json"
_WORKFLOW = "workflows/Snakefile"
_PROFILES = {
    "https://w3id.org/ro/wfrun/process/0.5": "Process Run Crate",
    "https://w3id.org/ro/wfrun/workflow/0.5": "Workflow Run Crate",
    "https://w3id.org/workflowhub/workflow-ro-crate/1.0": "Workflow RO-Crate",
}
_CONSTRAINTS = {
    "constraints.txt": "The versions that this checkout is tested with",
    "requirements.lock": "The same with the hashes of every file, which pip checks",
    "environment.yml": "The same for conda",
}


def describe(records: str, shown: str, runs: Sequence[Record], when: datetime, commit: str) -> bytes:
    """The metadata of a bundle of a commit of `when`: `runs` lie in the folder `records`, what they show in `shown`.

    No agent: records do not say who ran them. Times are the first start and the last end of the runs.
    """
    crate = ROCrate(version="1.1")  # that of the profiles
    cited = citation.read()
    _describe_root(crate, cited, when, commit)
    workflow = _workflow(crate, cited, runs)
    inputs = [
        _data(crate, "config/", "Experiments, tiers, platforms, claims and their tolerances", "configuration"),
        _data(crate, "data/", "Traces and models, and the published numbers", "data"),
    ]
    outputs = [
        _data(crate, records, f"{len(runs)} run records, one a point and repeat", "records"),
        _data(crate, f"{shown}report.html", "Verdicts and figures in one file", "report"),
        _data(crate, f"{shown}claims.json", "The verdict of every claim", "verdicts"),
        _data(crate, f"{shown}figures/", "Every figure, as PNG and SVG", "figures"),
    ]
    workflow["input"] = [entity["exampleOfWork"] for entity in inputs]
    workflow["output"] = [entity["exampleOfWork"] for entity in outputs]
    action = crate.add_action(workflow, "#run", object=inputs, result=outputs, properties=_times(runs))
    crate.root_dataset["mentions"] = [action]
    return (json.dumps(crate.metadata.generate(), indent=2, ensure_ascii=False) + "\n").encode()


def _describe_root(crate: ROCrate, cited: dict[str, Any], when: datetime, commit: str) -> None:
    root = crate.root_dataset
    crate.name, crate.description, crate.datePublished = cited["title"], cited["abstract"], when
    crate.keywords = cited["keywords"]
    root["version"], root["identifier"] = cited["version"], f"git commit {commit}"
    url = citation.license_url(cited)
    crate.license = crate.add(ContextEntity(crate, url, {"@type": "CreativeWork", "name": cited["license"]}))
    root["author"] = [
        crate.add(ContextEntity(crate, f"#author-{number}", _typed(citation.person(author))))
        for number, author in enumerate(cited["authors"], 1)
    ]
    root["publisher"] = root["author"][0]
    root["conformsTo"] = [
        crate.add(ContextEntity(crate, uri, {"@type": "CreativeWork", "name": name, "version": uri.rpartition("/")[2]}))
        for uri, name in _PROFILES.items()
    ]
    root["citation"] = [
        crate.add(ContextEntity(crate, f"https://arxiv.org/abs/{citation.arxiv(paper)}", _article(paper)))
        for paper in cited["references"]
    ]


def _article(paper: dict[str, Any]) -> dict[str, Any]:
    return {"@type": "ScholarlyArticle", "name": paper["title"], "datePublished": str(paper["year"])}


def _typed(person: dict[str, str]) -> dict[str, str]:
    return {f"@{key}" if key == "type" else key: value for key, value in person.items()}


def _workflow(crate: ROCrate, cited: dict[str, Any], runs: Sequence[Record]) -> Entity:
    """The Snakefile, with Snakemake's version as the newest run has it, and the files that pin its environment."""
    newest = max(runs, key=lambda run: run.provenance.start).provenance
    version = newest.packages.get("snakemake")
    workflow = crate.add_workflow(dest_path=_WORKFLOW, main=True, lang="snakemake", lang_version=version)
    workflow["name"] = "From configuration to records, figures, verdicts and report"
    workflow["license"] = citation.license_url(cited)
    workflow["version"] = cited["version"]
    workflow["creator"] = crate.root_dataset["author"]
    workflow["softwareRequirements"] = [
        crate.add_file(dest_path=path, properties={"name": name, "encodingFormat": "text/plain"})
        for path, name in _CONSTRAINTS.items()
    ]
    return workflow


def _data(crate: ROCrate, path: str, name: str, parameter: str) -> Entity:
    """A file or folder of the bundle, as an example of an input or output of the workflow."""
    is_file = not path.endswith("/")
    add = crate.add_file if is_file else crate.add_dataset
    kind = {".html": "text/html", ".json": "application/json"}
    properties = {"name": name, "description": name}
    if is_file:
        properties["encodingFormat"] = kind[path[path.rindex(".") :]]
    entity = add(dest_path=path, properties=properties)
    formal = crate.add_formal_parameter(parameter, "File" if is_file else "Dataset", f"#{parameter}", name)
    formal["workExample"], entity["exampleOfWork"] = entity, formal
    return entity


def _times(runs: Sequence[Record]) -> dict[str, Any]:
    """When the runs began and ended, and what they were."""
    first, last = min(run.provenance.start for run in runs), max(run.provenance.end for run in runs)
    commits = sorted({run.provenance.git_commit[:7] for run in runs if run.provenance.git_commit})
    return {
        "name": f"{len(runs)} runs of points, and what was made of their records",
        "description": f"Runs by the code of commits {', '.join(commits)}; each record says which, on which machine and when.",
        "startTime": first.isoformat(),
        "endTime": last.isoformat(),
        "actionStatus": "http://schema.org/CompletedActionStatus",
    }
