"""The shape of every report's JSON: its keys, in their order, with their types.

`python -m tests.reports.shapes` prints what `shapes.json` shall hold. As long as `schema` is 1, no
key of it may go or change its type.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ckptmove
from ckptmove.display.plain import Plain

SHAPES = Path(__file__).with_name("shapes.json")
#: The public classes whose JSON stands for itself.
REPORTS: tuple[type[Plain], ...] = (
    ckptmove.Manifest,
    ckptmove.RelocateReport,
    ckptmove.ConvertReport,
    ckptmove.Diff,
    ckptmove.ValidationReport,
    ckptmove.Diagnosis,
    ckptmove.RecoverReport,
    ckptmove.SalvageReport,
    ckptmove.MoveReport,
    ckptmove.BatchPlan,
    ckptmove.BatchReport,
)


def shape_of(schema: dict[str, Any]) -> Any:
    """A schema in few words: `"string"`, `["integer"]`, `{"name": "string"}`."""
    if "anyOf" in schema:
        shapes = [shape_of(each) for each in schema["anyOf"]]
        if all(isinstance(each, str) for each in shapes):
            return " or ".join(shapes)
        return next(each for each in shapes if each != "null")
    if "enum" in schema:
        return "string"
    if schema.get("type") == "array":
        return [shape_of(schema["items"])]
    if "properties" in schema:
        required = schema["required"]
        return {
            name if name in required else f"{name}?": shape_of(each)
            for name, each in schema["properties"].items()
        }
    if schema.get("type") == "object":
        return {"*": shape_of(schema["additionalProperties"])}
    return schema.get("type", "any")


def shapes() -> dict[str, Any]:
    """The shape of each report, by the name of its class."""
    return {kind.__name__: shape_of(kind.json_schema()) for kind in REPORTS}


def text() -> str:
    """All shapes, a line a key."""
    reports = (
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f" {json.dumps(key)}: {json.dumps(each)}" for key, each in shape.items())
        + "\n}"
        for name, shape in shapes().items()
    )
    return "{\n" + ",\n".join(reports) + "\n}\n"


if __name__ == "__main__":
    sys.stdout.write(text())
