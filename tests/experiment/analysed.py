"""The analysis of a run, as its schema says."""

import json
from importlib.resources import files
from pathlib import Path

import jsonschema

SCHEMA = json.loads(files("xdm_ft.report").joinpath("analysis.schema.json").read_text(encoding="utf-8"))


def analysis(run):
    found = json.loads((Path(run) / "analysis.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    return found
