"""JSON Schemas of everything that is written by hand or read by other programs."""

import json

from repro.claims.document import Document
from repro.plan import config
from repro.records import record

MODELS = {"record": record.Record, "config": config.Config, "platform": config.Platform, "claims": Document}


def document(model: str) -> str:
    """JSON Schema of `model` as text; ValueError lists the known ones."""
    if model not in MODELS:
        raise ValueError(f"no schema {model!r}, known: {', '.join(MODELS)}")
    return json.dumps(MODELS[model].model_json_schema(), indent=1) + "\n"
