"""A report as an HTML file: complete, self-contained, inert; and it works in a real browser."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64encode
from collections.abc import Awaitable, Callable
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

import ckptmove
from ckptmove.display.blocks import Table
from ckptmove.display.columns import Columns, Drawing
from ckptmove.display.page import START, page_of
from tests.conftest import RunCli
from tests.making.checkpoints import MAKERS, kept_on_cpu, save
from tests.oracles import browser

HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='t'\">"
)


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text of each script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "h1": [], "td": []}
        self._open = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = tag
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in self.texts:
            self.texts[self._open][-1] += data

    def data(self) -> list[dict[str, Any]]:
        """What the page's script makes tables of."""
        kinds = [attrs.get("type") for tag, attrs in self.found if tag == "script"]
        pairs = zip(kinds, self.texts["script"], strict=True)
        return [json.loads(text) for kind, text in pairs if kind == "application/json"]


def decoded(column: dict[str, Any]) -> list[Any]:
    """A column as the page's script reads it."""
    if "numbers" in column:
        return list(column["numbers"])
    if "at" in column:
        return [column["texts"][n] for n in column["at"]]
    texts, before = list[str](), b""
    for shared, rest in zip(column["front"][::2], column["front"][1::2], strict=True):
        before = before[: 2 * shared] + rest.encode("utf-16-le")
        texts.append(before.decode("utf-16-le"))
    return texts


@pytest.fixture
def run_pt(tmp_path: Path) -> Path:
    saved = MAKERS["adamw_training"]()
    return save(tmp_path / "run.pt", saved, keep_cpu=kept_on_cpu(saved))


def hostile_file(path: Path) -> Path:
    names = [HOSTILE, "<b>bold</b>", "a\u2028b", "😀1", "😀2", "é\x00", '"q".x', "&lt;"]
    torch.save({name: torch.ones(n + 1) for n, name in enumerate(names)}, path)
    return path


def test_a_page_loads_nothing_and_runs_its_own_script_only(run_pt: Path) -> None:
    page = Elements(ckptmove.inspect(run_pt).to_html("run.pt"))
    for tag, attrs in page.found:
        assert tag not in ("link", "img", "iframe", "object", "base", "a", "form")
        assert not {"src", "href", "style", "srcdoc"} & attrs.keys()
        assert not any(name.startswith("on") for name in attrs)
    policy = next(a["content"] for _, a in page.found if "http-equiv" in a)
    assert policy is not None
    assert "default-src 'none'" in policy
    code = [each for each in page.texts["script"] if not each.startswith("{")]
    for text in (*code, *page.texts["style"]):
        assert f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}" in policy
    assert "unsafe" not in policy


def test_it_holds_every_tensor(run_pt: Path) -> None:
    report = ckptmove.inspect(run_pt)
    (data,) = Elements(report.to_html()).data()
    rows = dict(zip(data["head"], map(decoded, data["columns"]), strict=True))
    assert rows["name"] == [entry.name for entry in report.tensors]
    assert rows["device"] == [entry.device for entry in report.tensors]
    assert rows["bytes"] == [entry.nbytes for entry in report.tensors]


@pytest.mark.parametrize("format", ["shards", "dcp"])
def test_files_and_ranks_are_told_where_there_are_several(format: str, tmp_path: Path) -> None:
    """The library of each format is the oracle of what is in which file."""
    expected: set[tuple[Any, ...]]
    state = {"a": torch.ones(300, 4), "b": torch.ones(200, 4), "c": torch.ones(50, 4)}
    if format == "shards":
        ckptmove.save(state, f"{tmp_path}/x/", max_shard_size=5000)
        library = pytest.importorskip("safetensors.torch")
        files = [(path, library.load_file(path)) for path in (tmp_path / "x").glob("*.safetensors")]
        expected = {
            (path.name, None, len(held), sum(each.nbytes for each in held.values()))
            for path, held in files
        }
        lies = {name: path.name for path, held in files for name in held}
    else:
        torch.save(state, tmp_path / "x.pt")
        ckptmove.convert(tmp_path / "x.pt", tmp_path / "x", format="dcp", ranks=2)
        found = FileSystemReader(tmp_path / "x").read_metadata()
        boxes = list(found.storage_data.items())
        expected = {
            (f"__{rank}_0.distcp", rank, len(held), 275 * 4 * 4)
            for rank in range(2)
            if (held := {i.fqn for i, each in boxes if each.relative_path == f"__{rank}_0.distcp"})
        }
        lies = dict.fromkeys(state, "2 files")
    report = ckptmove.inspect(tmp_path / "x")
    assert {tuple(each) for each in report.file_shares} == expected
    (data,) = Elements(report.to_html()).data()
    rows = dict(zip(data["head"], map(decoded, data["columns"]), strict=True))
    assert dict(zip(rows["name"], rows["file"], strict=True)) == lies
    assert data["head"].index("file") in data["map"]["colors"]
    assert report.file_shares[0].name in Elements(report.to_html()).texts["td"]


def test_shared_bytes_are_drawn_once(tmp_path: Path) -> None:
    tied = torch.ones(8)
    torch.save({"a": tied, "b": tied, "c": torch.ones(2), "d": tied[4:]}, tmp_path / "x.pt")
    (data,) = Elements(ckptmove.inspect(tmp_path / "x.pt").to_html()).data()
    assert data["map"]["nbytes"] == [32, 0, 8, 0]


def test_hostile_names_are_text(tmp_path: Path) -> None:
    report = ckptmove.inspect(hostile_file(tmp_path / "x.pt"))
    text = report.to_html(HOSTILE)
    assert HOSTILE not in text
    page = Elements(text)
    assert [tag for tag, _ in page.found].count("script") == 2
    (data,) = page.data()
    assert HOSTILE in decoded(data["columns"][0])
    assert '"\\u00e9\\u0000"' in decoded(data["columns"][0])


def test_a_comparison_draws_how_much_differs(tmp_path: Path) -> None:
    kept = torch.zeros(2)
    torch.save({"w": kept, "v": kept + 1, "n": 1}, tmp_path / "a.pt")
    torch.save({"w": kept + 0.5, "v": kept + torch.inf, "n": 2}, tmp_path / "b.pt")
    found = ckptmove.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    (data,) = Elements(found.to_html()).data()
    rows = list(zip(*map(decoded, data["columns"]), strict=True))
    assert [row[:3] for row in rows if row[0] == "changed"] == [
        ("changed", "w", 0.5),
        ("changed", "v", None),
    ]
    assert rows[0][3:5] == ("0", "0.5")
    assert "inf" in rows[1][4]
    assert ("value", "n", None, "1", "2", "") in rows


def test_what_is_wrong_stands_first_and_is_marked(tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save({"w": torch.full((2,), float(ord(name[0])))}, tmp_path / name)
    page = ckptmove.validate(tmp_path / "a.pt", against=tmp_path / "b.pt").to_html()
    assert '<td class="wrong">FAILED</td>' in page
    assert re.search(r'<main>\n<h1 class="wrong">[^<]*failed: against</h1>', page)


@pytest.mark.sample(1)
@pytest.mark.parametrize("verb", ["inspect", "convert", "relocate", "validate"])
def test_a_batch_is_one_table_with_what_failed_first(
    verb: str, tmp_path: Path, run_cli: RunCli
) -> None:
    (tmp_path / "runs").mkdir()
    save(tmp_path / "runs" / "a.pt", {"w": torch.ones(2), "n": torch.ones(3).half()}, "cuda:1")
    (tmp_path / "runs" / "b.pt").write_bytes((tmp_path / "runs" / "a.pt").read_bytes()[:500])
    more = {"convert": ("out",), "relocate": ("out", "--to", "cpu")}.get(verb, ())
    run_cli("batch", verb, "runs", *more, "--html", "all.html", exit=1)
    page = (tmp_path / "all.html").read_text()
    assert re.search(r'<h1 class="wrong">[^<]*1 failed', page)
    cells = Elements(page).texts["td"]
    assert cells[:2] == ["failed", "b.pt"]
    assert "interrupted upload" in cells[7]
    assert "ckptmove salvage" in cells[7]
    row = "done", "a.pt", "torch-zip", "cuda:1", "float32, float16", "2"
    assert tuple(cells[8:14]) == row
    assert cells[17:19] == ["total: 2 items", "1 format"]


def test_long_tables_become_data_with_the_lines_below_them() -> None:
    rows = [(f"row {n}", str(n)) for n in range(300)]
    table = Table(rows, ("name", "n"), right=(1,), details={1: ("why", "how")})
    (data,) = Elements(page_of("t", ["head", table])).data()
    columns = [decoded(each) for each in data["columns"]]
    assert columns[0] == [name for name, _ in rows]
    assert columns[2][:3] == ["", "why · how", ""]
    short = Elements(page_of("t", [Table(rows[:2], details={1: ("why",)})]))
    assert short.texts["h1"] == ["t"]
    assert short.texts["td"] == ["row 0", "0", "row 1", "1", "why"]


@pytest.mark.parametrize("texts", [["a", "ab", "ab", "😀", "😀b", "😁b", ""], ["x"] * 9, []])
def test_columns_come_back(texts: list[str]) -> None:
    (data,) = Elements(page_of("t", [Columns(("a",), (texts,))])).data()
    assert decoded(data["columns"][0]) == texts


def experts() -> Columns:
    """100,000 tensors of a mixture of experts."""
    count, kinds = 100_000, ("up", "down", "gate")
    names = [f"layers.{n // 1000}.experts.{n % 1000 // 3}.{kinds[n % 3]}.w" for n in range(count)]
    sizes = [4096 * (n % 9 + 1) for n in range(count)]
    columns = (names, ["model"] * count, ["cuda:0"] * count, sizes)
    head = ("name", "section", "device", "bytes")
    return Columns(head, columns, what="tensors", drawn=Drawing(0, (1,), (2, 1), 3))


@pytest.mark.slow
def test_a_hundred_thousand_tensors_stay_small() -> None:
    assert len(page_of("t", [experts()])) < 5e6


# -- the command line ---------------------------------------------------------------------------


COMMANDS = {
    "inspect run.pt": (0, "mixed"),
    "inspect run.pt --tree": (0, "mixed"),
    "diff run.pt w.pt": (1, "different"),
    "validate w.pt": (0, "w.pt"),
    "doctor": (0, ""),
    "batch validate . --include /w.pt": (0, ""),
}
SLOW = ("validate w.pt", "doctor", "batch validate . --include /w.pt")


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else []) for c in COMMANDS]
)
def test_each_command_writes_its_page(
    command: str, run_pt: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    code, start = COMMANDS[command]
    run_cli(*command.split(), "--html", "x.html", exit=code)
    text = (tmp_path / "x.html").read_text("utf-8")
    assert text.startswith(START)
    assert Elements(text).texts["h1"][0].startswith(start)


def test_only_a_page_is_replaced(run_pt: Path, tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "notes.html").write_text("<!doctype html>\nmine")
    printed = run_cli("inspect", "run.pt", "--html", "notes.html", exit=4)
    assert (printed.stdout, printed.stderr) == (
        "", "ckptmove: notes.html: the destination exists\n"
    )  # fmt: skip
    assert (tmp_path / "notes.html").read_text() == "<!doctype html>\nmine"
    run_cli("inspect", "run.pt", "--html", "x.html", exit=0)
    (tmp_path / "x.html").write_text(f"{START}older")
    run_cli("inspect", "run.pt", "--html", "x.html", exit=0)
    assert "older" not in (tmp_path / "x.html").read_text("utf-8")[:100]
    run_cli("inspect", "run.pt", "--html", "none/x.html", exit=4)
    run_cli("inspect", "run.pt", "--html", "run.pt", exit=4)


# -- in a browser -------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(browser.PROGRAM is None, reason="there is no chromium here")


def shown(path: Path, tmp_path: Path, act: Callable[[browser.Tab], Awaitable[None]]) -> None:
    """Open a page, do something there, and see that it neither complained nor loaded anything."""
    pytest.importorskip("aiohttp")

    async def show() -> None:
        async with browser.open_tab(path, tmp_path / "profile") as tab:
            await act(tab)
            assert tab.complaints == []
            assert all(url == path.resolve().as_uri() for url in tab.requests)

    asyncio.run(asyncio.wait_for(show(), 300))


def written(report: ckptmove.Manifest, path: Path) -> Path:
    path.write_text(report.to_html(path.name), "utf-8")
    return path


ROWS = "document.querySelectorAll('section tbody tr').length"
STATUS = "document.querySelector('[role=status]').textContent"
LABELS = "[...document.querySelectorAll('.box[tabindex=\"0\"]')].map(each => each.ariaLabel)"
CRUMBS = "[...document.querySelectorAll('.path button')].map(each => each.textContent)"
FIRST = "document.querySelector('section tbody td').textContent"


@needs_browser
def test_one_can_search_sort_and_zoom(run_pt: Path, tmp_path: Path) -> None:
    report = ckptmove.inspect(run_pt)
    names = [entry.name for entry in report.tensors]

    async def act(tab: browser.Tab) -> None:
        assert await tab.run(ROWS) == len(names)
        assert await tab.run(FIRST) == names[0]
        typed = "s = document.querySelector('input'); s.value = 'EXP_AVG';"
        await tab.run(f"{typed} s.dispatchEvent(new Event('input')); 0")
        found = [name for name in names if "exp_avg" in name]
        assert await tab.run(STATUS) == f"{len(found)} of {len(names)} tensors"
        await tab.run("s.value = ''; s.dispatchEvent(new Event('input')); 0")
        for _ in range(2):
            await tab.run("document.querySelectorAll('th button')[5].click(); 0")
        largest = max(report.tensors, key=lambda entry: entry.nbytes)
        at = [each.nbytes for each in report.tensors if each.name == await tab.run(FIRST)]
        assert largest.nbytes in at
        labels = await tab.run(LABELS)
        assert not any(label.startswith("model.model ") for label in labels)
        assert labels[0].split()[0].split(".")[0] in {str(each.section) for each in report.tensors}
        await tab.run("document.querySelector('.box').click(); 0")
        assert len(await tab.run(CRUMBS)) == 2
        assert " of " in await tab.run(STATUS)
        await tab.run("document.querySelector('.box').focus(); 0")
        await tab.press("Escape")
        assert len(await tab.run(CRUMBS)) == 1
        await tab.press("Enter")
        assert len(await tab.run(CRUMBS)) == 2
        legend = await tab.run("document.querySelector('.legend').textContent")
        assert all(device in legend for device in report.devices)

    shown(written(report, tmp_path / "x.html"), tmp_path, act)


@needs_browser
def test_a_step_is_drawn_by_module_line_and_device(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ckptmove.trace(model, optimizer, device="cpu") as watch:
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    assert watch.diagnosis is not None
    spans = watch.trace.timeline.spans
    (tmp_path / "x.html").write_text(watch.diagnosis.to_html("x"), "utf-8")

    async def act(tab: browser.Tab) -> None:
        assert await tab.run(STATUS) == f"{len(spans)} spans"
        lanes = "[...document.querySelectorAll('.of')].map(each => each.textContent)"
        assert await tab.run(lanes) == ["", "cpu"]
        drawn = "document.querySelectorAll('.lane:not(.parts) .box').length"
        assert await tab.run(drawn) == len(spans)
        labels = [label.split(":")[0] for label in await tab.run(LABELS)]
        assert [each for each in labels if each != "between"] == [
            "forward", "backward", "optimizer"
        ]  # fmt: skip
        await tab.run(
            f"document.querySelectorAll('.box[tabindex]')[{labels.index('forward')}].click()"
        )
        forward = sum(each.phase == "forward" for each in spans)
        assert await tab.run(STATUS) == f"{forward} of {len(spans)} spans"
        assert [label.split(":")[0].split(".")[0] for label in await tab.run(LABELS)] == [
            "0",
            "1",
            "2",
        ]
        await tab.run("document.querySelector('.box[tabindex]').focus(); 0")
        await tab.press("ArrowRight")
        await tab.press("Enter")
        assert len(await tab.run(CRUMBS)) == 3
        for left in (2, 1):
            await tab.press("Escape")
            assert len(await tab.run(CRUMBS)) == left
        assert await tab.run(STATUS) == f"{len(spans)} spans"

    shown(tmp_path / "x.html", tmp_path, act)


@needs_browser
def test_all_of_a_page_is_on_paper_in_dark_ink(tmp_path: Path) -> None:
    """Also where the screen is dark: nothing lies beside the paper, in bars or behind buttons."""
    (tmp_path / "runs").mkdir()
    for n in range(3):
        save(tmp_path / "runs" / f"{'checkpoint-' * 3}{n}.pt", MAKERS["adamw_training"](), "cuda:1")
    (tmp_path / "runs" / "broken.pt").write_bytes(b"PK\3\4" + bytes(2000))
    with ckptmove.batch("relocate", tmp_path / "runs", tmp_path / "out", to="cpu") as batch:
        for _ in batch:
            pass
        (tmp_path / "x.html").write_text(batch.report().to_html("x"), "utf-8")
    right = "map(each => each.getBoundingClientRect().right)"
    reaches = f"Math.max(...[...document.querySelectorAll('td, p')].{right})"

    async def act(tab: browser.Tab) -> None:
        await tab.call(
            "Emulation.setDeviceMetricsOverride",
            width=700,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        for media, ink in (("screen", "rgb(230, 232, 235)"), ("print", "rgb(0, 0, 0)")):
            dark = [{"name": "prefers-color-scheme", "value": "dark"}]
            await tab.call("Emulation.setEmulatedMedia", media=media, features=dark)
            assert await tab.run("getComputedStyle(document.body).color") == ink
        assert (
            await tab.run("getComputedStyle(document.querySelector('.wide')).overflowX")
            == "visible"
        )
        assert await tab.run(reaches) <= 700

    shown(tmp_path / "x.html", tmp_path, act)


@needs_browser
def test_hostile_names_do_nothing_in_a_browser(tmp_path: Path) -> None:
    report = ckptmove.inspect(hostile_file(tmp_path / "x.pt"))

    async def act(tab: browser.Tab) -> None:
        assert await tab.run("document.title") == "x.html - ckptmove"
        cells = "[...document.querySelectorAll('section td:first-child')].map(e => e.textContent)"
        assert HOSTILE in await tab.run(cells)
        assert {"😀1", "😀2"} <= set(await tab.run(cells))
        assert await tab.run("document.querySelectorAll('img, b').length") == 0

    shown(written(report, tmp_path / "x.html"), tmp_path, act)


@needs_browser
@pytest.mark.slow
def test_a_hundred_thousand_tensors_can_be_looked_at(tmp_path: Path) -> None:
    async def act(tab: browser.Tab) -> None:
        assert await tab.run(STATUS) == "100,000 tensors"
        assert await tab.run(ROWS) == 200
        await tab.run("document.querySelector('.more').click(); 0")
        assert await tab.run(ROWS) == 400
        typed = "s = document.querySelector('input'); s.value = 'layers.77. down'; "
        await tab.run(f"{typed} s.dispatchEvent(new Event('input')); 0")
        assert await tab.run(STATUS) == "333 of 100,000 tensors"
        assert len(await tab.run(LABELS)) >= 1

    (tmp_path / "x.html").write_text(page_of("x", [experts()]), "utf-8")
    shown(tmp_path / "x.html", tmp_path, act)
