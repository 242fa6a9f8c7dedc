"""The JSON Schemas that `repro schema` prints: valid, and of the files that we ship."""

import json

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from repro import paths
from repro.cli import app

FILES = {
    "record": "results/reference/*/records/**/*.json",
    "config": "config/config.yaml",
    "platform": "config/platforms/*.yaml",
    "claims": "config/claims.yaml",
}


@pytest.mark.parametrize("name", FILES)
def test_a_schema_is_valid_and_accepts_the_shipped_files(name):
    schema = json.loads(CliRunner().invoke(app, ["schema", name]).stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    files = sorted(paths.root().glob(FILES[name]))
    assert files
    for path in files:
        document = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
        assert not list(map(str, validator.iter_errors(document))), path
    assert not validator.is_valid([])
