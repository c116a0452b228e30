"""How reports and manifests are shown."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import torch
from torch import nn

import ckptmove
from tests.making.living import LanguageModel, row, stepped

# -- how it is shown -------------------------------------------------------------------------------


def test_the_report_is_printed() -> None:
    model = LanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    stepped(model, optimizer)
    shown = str(ckptmove.report(model, optimizer)).splitlines()
    assert shown[:3] == [
        "uniform cpu",
        "LanguageModel: live model, 4.1 kB",
        "inputs go to cpu (embed, the first module with parameters)",
    ]
    assert [line.split() for line in shown[4:7]] == [
        ["section", "held", "as", "device", "dtype", "tensors", "storages", "bytes"],
        ["model", "parameter", "cpu", "float32", "42", "41", "1.2", "kB"],
        ["buffer", "that", "is", "not", "saved", "cpu", "int64", "1", "1", "40", "B"],
    ]
    assert repr(ckptmove.report(model)).startswith("<Manifest of 'LanguageModel': ")


def test_modules_are_shown_with_what_is_theirs_alone() -> None:
    model = LanguageModel()
    stepped(model, torch.optim.SGD(model.parameters()))  # gradients are not counted anew
    assert row(ckptmove.report(model), "layers.{0..9}") == ["layers.{0..9}", "cpu", "70", "1.5 kB"]
    flat = torch.zeros(8)
    inner = nn.Linear(2, 2, bias=False)
    parts = nn.ModuleDict({"a": nn.Module(), "b": nn.Module(), "c": nn.Sequential(inner, inner)})
    for n, key in enumerate("ab"):
        parts[key].register_buffer("part", flat[4 * n : 4 * n + 4])
    report = ckptmove.report(nn.ModuleDict({"parts": parts, "rest": nn.Linear(1, 1)}).eval())
    assert row(report, "parts.c.0") == ["parts.c.0", "cpu", "1", "16 B"]
    assert row(report, "parts.c.1") == ["parts.c.1", "cpu", "tied to parts.c.0.weight"]
    report = ckptmove.report(parts)
    assert row(report, "b") == ["b", "cpu", "1", "0 B"]  # no tie: another part of the storage
    pair = nn.ModuleDict({"x": nn.ModuleDict({"y": inner, "z": inner}), "rest": nn.Linear(1, 1)})
    assert row(ckptmove.report(pair), "x") == ["x", "cpu", "1", "16 B"]


class Tags(HTMLParser):
    """What is open, what was met, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.met: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Goes in."""
        self.open.append(tag)
        self.met.add(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        """Must be what went in last."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Shown."""
        self.text += data


def test_a_notebook_shows_it() -> None:
    class Evil(nn.Module):
        pass

    Evil.__name__ = "<script>alert(1)</script>"
    model = Evil()
    model.add_module("<b>&\x1b", nn.Linear(2, 2))
    model.tag = torch.device("cpu")  # type: ignore[assignment]  # as users do
    model.pos = torch.ones(2)
    report = ckptmove.report(model)
    html = report._repr_html_()
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert tags.met == {"div", "table", "thead", "tbody", "tr", "th", "td"}
    assert tags.attributes == {"style"}
    assert "http" not in html
    assert "color:" not in html
    for text in ("uniform cpu", "<script>alert(1)</script>: live model", "<b>&\\x1b", "persistent"):
        assert text in tags.text


def test_a_file_shows_itself_too(tmp_path: Path) -> None:
    torch.save(LanguageModel().state_dict(), tmp_path / "model.pt")
    manifest = ckptmove.inspect(tmp_path / "model.pt")
    assert str(manifest).startswith(f"uniform cpu\n{tmp_path}/model.pt: torch-zip, ")
    assert "layers.{0..9}.inner.weight" in str(manifest)
    assert "layers.{0..9}.inner.weight" in manifest._repr_html_()
    assert "layers.{0..9}" not in str(manifest.select("embed.*"))


def test_a_part_of_a_report_is_one_too() -> None:
    report = ckptmove.report(LanguageModel()).select("layers.*")
    assert "layers.{0..9}" in str(report)
    assert "embed " not in str(report)
    assert report.devices["cpu"].tensors == 70
