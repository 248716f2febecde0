"""JSON Schemas of the bundle's JSON members, generated from the typed models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from dsc.bundle_schema.certificate import Certificate
from dsc.bundle_schema.dflash_config import DflashConfig
from dsc.bundle_schema.kv_plan import KvPlan
from dsc.bundle_schema.manifest import Manifest
from dsc.bundle_schema.tensors import StrictModel

SCHEMAS: Final[dict[str, type[StrictModel]]] = {
    "certificate": Certificate,
    "dflash_config": DflashConfig,
    "kv_plan": KvPlan,
    "manifest": Manifest,
}


def schema_text(name: str) -> str:
    """The JSON Schema (draft 2020-12) of a member, as published next to this module.

    Args:
        name: a key of `SCHEMAS`.
    """
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | SCHEMAS[name].model_json_schema()
    return json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def schema_path(name: str) -> Path:
    """The published file of a schema."""
    return Path(__file__).parent / f"{name}.v1.schema.json"


def write_schemas() -> None:
    """Write every schema file; a test keeps them equal to the models."""
    for name in SCHEMAS:
        schema_path(name).write_text(schema_text(name), encoding="utf-8")
