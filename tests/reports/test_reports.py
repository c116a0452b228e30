"""Every report: its JSON has the declared shape, and its text, HTML and JSON say the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest
import torch
from torch import nn

import ckptmove
from ckptmove.display.blocks import Table, html_of, text_of
from ckptmove.display.json_text import json_text
from ckptmove.display.plain import OMITTED, Key, Plain, Seconds, derived_key, to_json
from ckptmove.display.report import Report
from tests.making.checkpoints import MAKERS, kept_on_cpu, save
from tests.making.living import LanguageModel, stepped
from tests.reports import shapes


def made(tmp_path: Path) -> list[Report]:
    """Reports of every kind, as real calls return them."""
    saved = MAKERS["adamw_training"]()
    run = save(tmp_path / "run.pt", saved, keep_cpu=kept_on_cpu(saved))
    module = save(tmp_path / "module.pt", MAKERS["whole_module"]())
    model = LanguageModel(2)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckptmove.trace(model, optimizer, device="cpu") as watch:
        stepped(model, optimizer)
    assert watch.diagnosis is not None
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "bad.pt").write_bytes(run.read_bytes()[:-99])
    (tmp_path / "tree" / "run.pt").write_bytes(run.read_bytes())
    batch = ckptmove.batch("relocate", tmp_path / "tree", tmp_path / "out", to="cpu", jobs=1)
    failed = list(batch)
    assert {each.outcome for each in failed} == {"done", "failed"}
    return [
        ckptmove.inspect(run),
        ckptmove.inspect(module),
        ckptmove.report(model, optimizer),
        ckptmove.relocate(run, tmp_path / "moved.pt", to="cuda:1", values=True),
        ckptmove.relocate(module, to="cuda:1", dry_run=True),
        ckptmove.convert(run, tmp_path / "run.safetensors", weights="model"),
        ckptmove.convert(module, tmp_path / "module.safetensors", drop=["*"], dry_run=True),
        ckptmove.diff(run, tmp_path / "moved.pt"),
        ckptmove.diff(run, module),
        ckptmove.validate(tmp_path / "moved.pt", against=run),
        ckptmove.recover(run),
        ckptmove.salvage(run, tmp_path / "salvaged.safetensors"),
        ckptmove.move(model, to="cpu", dry_run=True),
        watch.diagnosis,
        batch.plan,
        batch.report(),
    ]


def test_real_reports_have_the_declared_shape(tmp_path: Path) -> None:
    schemas = pytest.importorskip("jsonschema")
    found = made(tmp_path)
    assert {kind.__name__ for kind in shapes.REPORTS} <= {
        base.__name__ for each in found for base in type(each).__mro__
    }
    for report in found:
        said = report.to_json()
        assert json.loads(json.dumps(said, allow_nan=False)) == said
        schemas.validate(said, report.json_schema())
        assert list(said) == [key for key in report.json_schema()["properties"] if key in said]
        lines = list(report.lines())
        assert str(report).split("\n")[: len(lines)] == lines
        assert all(f"  - {each}" in str(report) for each in report.remarks())
        assert len(list(report.lines(full=True))) >= len(lines)
        html = report._repr_html_()
        assert html.count("<div") == html.count("</div>")
        assert html.count("<tr>") == html.count("</tr>")


def test_no_key_of_a_report_is_lost() -> None:
    """`python -m tests.reports.shapes > tests/reports/shapes.json` after a key was added."""
    assert shapes.SHAPES.read_text() == shapes.text()


def test_a_diagnosis_is_read_back_as_it_was(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with ckptmove.trace(model, torch.optim.SGD(model.parameters(), 0.1), device="cpu") as watch:
        model(torch.ones(1, 2)).sum().backward()
    assert watch.diagnosis is not None
    said = json.loads(json.dumps(watch.diagnosis.to_json()))
    again = ckptmove.Diagnosis.from_json(said)
    assert again.to_json() == said
    assert str(again) == str(watch.diagnosis)


# -- the mechanism ---------------------------------------------------------------------------------


class Color(str, Enum):
    RED = "red"

    __str__ = str.__str__


class Pair(NamedTuple):
    left: int
    right: Annotated[float | None, Key(plain=str, gives=str)] = None


@dataclass(frozen=True)
class Part(Plain):
    name: Annotated[str, Key("called")]
    pairs: tuple[Pair, ...] = ()
    note: Annotated[str, Key(shown=attrgetter("note"))] = ""


@dataclass(frozen=True)
class Whole(Report):
    color: Color
    part: Part | None
    secret: Annotated[object, OMITTED] = None
    seconds: Seconds = 0.0
    counts: Mapping[Color, int] = field(default_factory=dict)
    late: Annotated[bool, Key(after="color")] = False

    @derived_key(after="color")
    def length(self) -> int:
        """A key that is computed."""
        return len(self.color)

    def blocks(self, *, full: bool = False) -> Any:
        """Show it."""
        yield f"{self.color}\x1b"
        yield ""
        yield Table([("a", "1"), ("<b>", "22")], ("name", "n"), right=(1,), details={0: ["more"]})


WHOLE = Whole(
    Color.RED, Part("p", (Pair(1), Pair(2, inf))), object(), 1.23456, {Color.RED: 2}, late=True
)
JSON = {
    "schema": 1,
    "color": "red",
    "late": True,
    "length": 3,
    "part": {"called": "p", "pairs": [{"left": 1, "right": "None"}, {"left": 2, "right": "inf"}]},
    "seconds": 1.235,
    "counts": {"red": 2},
}


def test_json_is_what_the_fields_declare() -> None:
    assert json.dumps(WHOLE.to_json()) == json.dumps(JSON)
    assert to_json(Pair(1)) == {"left": 1, "right": "None"}
    assert Part("p", note="n").to_json() == {"called": "p", "pairs": [], "note": "n"}
    assert Whole(Color.RED, None).to_json()["part"] is None
    assert shapes.shape_of(Whole.json_schema())["part"]["note?"] == "string"


def test_json_is_printed_as_python_prints_it() -> None:
    empty: dict[str, Any] = {"a": [], "b": {}, "c": (), "d": ""}
    odd = {"é\n\u2028": [1.5, inf, -0.0, True, None, 10**30, Color.RED], "x": ({"y": [[], [0]]},)}
    for value in (JSON, empty, odd, [], {}, 1, "é", None, [odd, empty]):
        assert json_text(value) == json.dumps(value, indent=2)


def test_json_is_read_back_by_the_same_declaration() -> None:
    said = Part("p", (), "n").to_json()
    assert Part.from_json(said) == Part("p", (), "n")
    assert Part.from_json({"called": "p", "pairs": []}) == Part("p")
    cases: tuple[Any, ...] = (
        3,
        {},
        {"pairs": []},
        {"called": 1, "pairs": []},
        {"called": "p", "pairs": 1},
        {"called": "p", "pairs": [1]},
        {"called": "p", "pairs": [{}]},
    )
    for wrong in cases:
        with pytest.raises(ValueError, match="no part: "):
            Part.from_json(wrong)


def test_text_and_html_show_the_same_blocks() -> None:
    lines = ["red\\x1b", "", "name   n", "a      1", "    more", "<b>   22"]
    assert list(WHOLE.lines()) == str(WHOLE).split("\n") == lines
    html = WHOLE._repr_html_()
    assert "&lt;b&gt;" in html
    assert '<td colspan="2"' in html
    assert '<td style="text-align:right' in html
    assert html.startswith('<div style="line-height:1.45"><div style="font-weight:bold"><div>red')
    assert html_of([""]) == '<div style="line-height:1.45"></div>'
    assert list(text_of([Table([])])) == []
    table = Table([("a", "b")], indent=2, gap=1, widths=(3, 9))
    assert list(text_of([table])) == ["  a   b"]
