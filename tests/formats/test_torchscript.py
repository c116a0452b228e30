"""TorchScript: run before and after by torch.jit; devices in the code, and what is none."""

from __future__ import annotations

import io
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.jit.mobile import _load_for_lite_interpreter

from ckptmove import InputError, Moved, inspect, relocate
from tests.conftest import RunCli
from tests.making.relaying import relay, rezipped
from tests.making.retagging import retag
from tests.making.scripts import SCRIPT_MAKERS
from tests.oracles.families import script_records
from tests.oracles.readers import assert_sound_zip, inert_pickle
from tests.oracles.sameness import assert_same_tree

INPUTS = {"many": torch.ones(2, 1), "helped": torch.ones(2)}
TO = ("cpu", "cuda:3", "privateuseone:15")
CODE = re.compile(r'torch\.device\("([^"]+)"\)')


def outputs(path: Path, name: str) -> object:
    """What the module makes of an example, with its tensors on the CPU."""
    loaded: Any = torch.jit.load(path, map_location="cpu")
    with torch.no_grad():
        return loaded(INPUTS.get(name, torch.ones(2, 3)))


def code(path: Path) -> dict[str, str]:
    """The code, by record."""
    return {
        at: data.decode() for at, data in script_records(path).items() if at.endswith(".py")
    }  # fmt: skip


# -- what runs, runs -------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("to", TO)
@pytest.mark.parametrize("tag", ["cpu", "cuda:1"])
@pytest.mark.parametrize("name", SCRIPT_MAKERS)
def test_it_computes_the_same(name: str, tag: str, to: str, tmp_path: Path) -> None:
    SCRIPT_MAKERS[name](path := tmp_path / "made.pt", tag)
    relocate(path, out := tmp_path / "out.pt", to=to)
    assert_sound_zip(out)
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
    assert code(out) == code(path)
    try:
        wanted = outputs(path, name)
    except (RuntimeError, NotImplementedError) as error:  # its code says cuda:1
        if "CUDA" not in str(error):
            raise
        return
    assert_same_tree(wanted, outputs(out, name))


@pytest.mark.parametrize("name", ["lite", "lite_with_debug_info"])
@pytest.mark.parametrize("to", TO)
def test_phones_compute_the_same(name: str, to: str, tmp_path: Path) -> None:
    SCRIPT_MAKERS[name](path := tmp_path / "made.ptl", "cuda:1")
    relocate(path, out := tmp_path / "out.ptl", to=to)
    results = []
    for each in (path, out):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module: Any = _load_for_lite_interpreter(str(each), map_location="cpu")
        results.append(module(torch.ones(2, 3)))
    assert_same_tree(*results)


@pytest.mark.parametrize("name", ["scripted", "traced", "many"])
def test_to_meta_and_back(name: str, tmp_path: Path) -> None:
    SCRIPT_MAKERS[name](path := tmp_path / "made.pt", "cuda:1")
    relocate(path, there := tmp_path / "there.pt", to="meta")
    assert inspect(there).devices.keys() == {"meta"}
    loaded: Any = torch.jit.load(there)
    assert {str(each.device) for each in loaded.parameters()} == {"meta"}
    relocate(there, back := tmp_path / "back.pt", to="cuda:1")
    ours, theirs = script_records(path), script_records(back)
    for at in ours:
        if at.endswith(".pkl"):
            assert_same_tree(*(inert_pickle(io.BytesIO(each[at])) for each in (ours, theirs)))
        else:
            assert ours[at] == theirs[at]


def test_what_is_traced_on_a_device_runs_elsewhere_with_its_values(tmp_path: Path) -> None:
    SCRIPT_MAKERS["traced_on_device"](path := tmp_path / "made.pt", "cuda:1")
    with pytest.raises((RuntimeError, NotImplementedError), match="CUDA"):
        outputs(path, "traced")
    report = relocate(path, out := tmp_path / "out.pt", to="cpu", values=True)
    assert len(report.values_rewritten) == 2
    SCRIPT_MAKERS["traced"](there := tmp_path / "there.pt", "cpu")
    assert_same_tree(outputs(there, "traced"), outputs(out, "traced"))


# -- devices in the code ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPT_MAKERS)
def test_places_in_the_code(name: str, tmp_path: Path) -> None:
    SCRIPT_MAKERS[name](path := tmp_path / "made.pt", "cuda:1")
    values = [v for v in inspect(path).values_naming_devices if v.kind.startswith("code")]
    found = {(value.name, value.value) for value in values if value.kind == "code"}
    assert found == {
        (f"{record}:{line}", device)
        for record, text in code(path).items()
        for line, each in enumerate(text.split("\n"), 1)
        for device in CODE.findall(each)
    }
    for value in values:
        record, _, line = value.name.rpartition(":")
        assert f'"{value.value}"' in code(path)[record].split("\n")[int(line) - 1]
        assert value.fixed == (value.kind == "code string")


class Wordy(nn.Module):
    """Devices as devices, and as words, in every way that code may hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))

    def forward(self, x: torch.Tensor, name: str = "none") -> list[torch.Tensor]:
        """Tensors on devices that are named."""
        words = 'say "cuda:1", or torch.device("cuda:1")'
        found = [x]
        if name == "cuda:1" or name == words or name == "é cuda:1":
            found.append(x.to(torch.device("cuda:1")))
        if name == "\t\\cuda:1\n":
            found.append(torch.zeros([2], device=torch.device("cuda:1")))
        if name == "cpu":
            found.append(torch.ones([2], device=torch.device("cpu")))
        return found


def wordy(path: Path, edit: Callable[[str], str] = str) -> Path:
    """`Wordy` with its weight on cuda:1, and its code edited."""
    torch.jit.save(torch.jit.script(Wordy()), path)

    def change(name: str, data: bytes) -> bytes:
        if name == "data.pkl":
            return retag(data, lambda _: "cuda:1")
        return edit(data.decode()).encode() if name.endswith("test_torchscript.py") else data

    relay(path, change)
    return path


def text_of(path: Path) -> str:
    """The code of `Wordy`."""
    (text,) = (text for at, text in code(path).items() if at.endswith("test_torchscript.py"))
    return text


@pytest.mark.parametrize("to", ["cpu", "cuda:3", "privateuseone:15", "mps"])
@pytest.mark.parametrize("stored", [False, True])
def test_values_rewrite_devices_and_no_words(to: str, stored: bool, tmp_path: Path) -> None:
    path, out = wordy(tmp_path / "made.pt"), tmp_path / "out.pt"
    if stored:
        path = all_stored(path, tmp_path / "stored.pt")
    before = text_of(path)
    report = relocate(path, out, to=to, values=True)
    assert text_of(out) == before.replace('torch.device("cuda:1")', f'torch.device("{to}")')
    assert len(report.values_rewritten) == before.count('torch.device("cuda:1")') == 2
    kinds = sorted(value.kind for value in report.values_naming_devices)
    assert kinds == ["code", "code string", "code string"], "a device, and words"
    assert_sound_zip(out)
    relocate(out, back := tmp_path / "back.pt", map={to: "cuda:1"}, values=True)
    if to != "cpu":
        assert text_of(back) == before
    assert outputs(out, "wordy") is not None


def all_stored(path: Path, out: Path) -> Path:
    """The same records, none of them deflated."""
    return rezipped(path, out, lambda _, content: content)


COMMENTS = '# torch.device("cuda:1") is "cuda:1"\n'


QUOTED = '    _w = "torch.device(\\"cuda:1\\")"\n'
EDITS: dict[str, Callable[[str], str]] = {
    "comment first": lambda text: COMMENTS + text,
    "comment behind": lambda text: text.replace("\n", '  # torch.device("cuda:1")\n', 1),
    "comment last": lambda text: text + COMMENTS.rstrip(),
    "CRLF": lambda text: text.replace("\n", "\r\n"),
    "wide characters": lambda text: "# é 😀 \x0c\n" + text,
    "spaces": lambda text: text.replace('torch.device("cuda:1")', "torch . device ( 'cuda:1' )"),
    "quoted": lambda text: text.replace("    found = ", QUOTED + "    found = ", 1),
    "lines": lambda text: text.replace('torch.device("cuda:1")', 'torch.device(\n    "cuda:1")'),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_comments_and_spaces(edit: Callable[[str], str], tmp_path: Path) -> None:
    path, out = wordy(tmp_path / "made.pt", edit), tmp_path / "out.pt"
    before = text_of(path)
    relocate(path, out, to="cuda:3", values=True)
    after = text_of(out)
    relocate(out, back := tmp_path / "back.pt", to="cuda:1", values=True)
    devices = re.compile(r"""(?m)^([^#\n]*(?<!\\")torch ?\. ?device ?\(\s*)(['"])cuda:1\2""")
    assert after == devices.sub(r'\1"cuda:3"', devices.sub(r'\1"cuda:3"', before))
    assert text_of(back) == before.replace("'cuda:1'", '"cuda:1"')
    assert [line for line in after.split("\n") if "#" in line and "device" in line] == [
        line for line in before.split("\n") if "#" in line and "device" in line
    ]


@pytest.mark.parametrize(
    "bad",
    [
        "x = 'cuda:1",
        '"""cuda:1',
    ],
)
def test_code_that_is_none_is_refused_in_a_line(bad: str, tmp_path: Path, run_cli: RunCli) -> None:
    path = wordy(tmp_path / "made.pt", lambda text: f"{text}\n{bad}\n")
    with pytest.raises(InputError, match="can't be parsed") as raised:
        inspect(path)
    assert "\n" not in str(raised.value)
    done = run_cli("relocate", path, "out.pt", "--to", "cpu", exit=3)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert not (tmp_path / "out.pt").exists()


def test_code_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = wordy(tmp_path / "made.pt")
    relay(path, lambda name, data: data + b"\xff" if name.endswith(".py") else data)
    with pytest.raises(InputError, match="is not text"):
        inspect(path)


def test_a_bomb_of_code_is_refused(tmp_path: Path) -> None:
    path = wordy(tmp_path / "made.pt")
    relay(path, lambda name, data: data + b" " * (65 << 20) if name.endswith(".py") else data)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(InputError, match="too long"):
        inspect(path)


@pytest.mark.parametrize("version", [b"0", b"11", b"99", b"-3", b"x", b"", b"3" * 70])
def test_other_versions_are_refused(version: bytes, tmp_path: Path) -> None:
    path = wordy(tmp_path / "made.pt")
    relay(path, lambda name, data: version if name == "version" else data)
    with pytest.raises(InputError):
        inspect(path)


# -- strings that share a memo slot ----------------------------------------------------------------


class Attributes(nn.Module):
    """Strings that equal the location, which libtorch memoises by value."""

    def __init__(self, tag: str) -> None:
        super().__init__()
        self.before = tag
        self.weight = nn.Parameter(torch.arange(3.0))
        self.after = tag
        self.names = [tag, "storage", tag]
        self.table = {tag: 1, "x": 2}
        self.where = torch.device(tag)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str, str, list[str], dict[str, int]]:
        """Everything."""
        return x + self.weight, self.before, self.after, self.names, self.table


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("to", ["mps", "cuda:3", "privateuseone:15"])
def test_strings_stay_what_they_are(to: str, values: bool, tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(Attributes("cpu")), path := tmp_path / "made.pt")
    relocate(path, out := tmp_path / "out.pt", to=to, values=values)
    loaded: Any = torch.jit.load(out, map_location="cpu")
    _, before, after, names, table = loaded(torch.ones(3))
    said = to if values else "cpu"
    assert (before, after, names, table) == (
        said,
        said,
        [said, "storage", said],
        {"cpu": 1, "x": 2},
    )
    assert str(loaded.where) == said
    _, places = inert_pickle(io.BytesIO(script_records(out)["data.pkl"]))
    assert {where for _, where in places} == {to}


# -- storages that pickles share -------------------------------------------------------------------


def test_bytecode_shares_the_constants(tmp_path: Path) -> None:
    """`frozen` for phones: its tensors are constants of both pickles."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.weight

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frozen: Any = torch.jit.freeze(torch.jit.script(Net().eval()))
        frozen._save_for_lite_interpreter(str(path := tmp_path / "made.ptl"))
    records = script_records(path)
    _, in_bytecode = inert_pickle(io.BytesIO(records["bytecode.pkl"]))
    _, in_constants = inert_pickle(io.BytesIO(records["constants.pkl"]))
    assert in_bytecode == in_constants == [("0.storage", "cpu")]
    assert inspect(path).storages.keys() == {"constants/0.storage"}
    assert len({each.storage for each in inspect(path).tensors}) == 1
    report = relocate(path, out := tmp_path / "out.ptl", to="cuda:3")
    assert report.moved == {"cpu→cuda:3": Moved(1, 12)}
    for kind in ("bytecode", "constants"):
        _, places = inert_pickle(io.BytesIO(script_records(out)[f"{kind}.pkl"]))
        assert places == [("0.storage", "cuda:3")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: Any = _load_for_lite_interpreter(str(out), map_location="cpu")
    assert module(torch.ones(3)).tolist() == [1, 2, 3]


class Made(torch.nn.Module):
    """Makes a file while it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.ones(2)

    @torch.jit.export
    def __getstate__(self) -> tuple[torch.Tensor, bool]:
        """What is saved."""
        return self.w, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, bool]) -> None:
        """Write outside of the file."""
        self.w = state[0] + torch.from_file("made", True, 16).sum()
        self.training = state[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use the weight."""
        return x * self.w


class Restored(Made):
    """Computes while it is loaded."""

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, bool]) -> None:
        """Restore the weight."""
        self.w = state[0] + 1
        self.training = state[1]


def test_code_that_loading_runs_is_refused_by_strict(
    tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.jit.save(torch.jit.script(Made()), "program.pt")
    torch.jit.load("program.pt")
    made = tmp_path / "made"
    made.unlink()  # it was there
    told = "__setstate__ in program/code/__torch__"
    for verb in (
        "inspect program.pt --strict",
        "relocate program.pt --to cuda:1 --strict",
        "validate program.pt --strict",
        "diff program.pt program.pt --strict",
    ):
        assert told in run_cli(*verb.split(), exit=3).stderr, verb
    assert told in run_cli("inspect", "program.pt", exit=0).stdout
    run_cli("validate", "program.pt", exit=0)
    assert not made.exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_that_loading_runs_is_refused_by_strict(
    tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter for phones runs it, and not the text beside it, which may be gone."""
    monkeypatch.chdir(tmp_path)
    torch.jit.script(Made())._save_for_lite_interpreter("phone.ptl")
    text = "import nothing"
    with zipfile.ZipFile("phone.ptl") as source, zipfile.ZipFile("bare.ptl", "w") as bare:
        for name in source.namelist():
            content = text.encode() if name.endswith(".py") else source.read(name)
            bare.writestr(name, content)
    made = tmp_path / "made"
    made.unlink(missing_ok=True)
    told = "__setstate__ in phone/bytecode.pkl, which names "
    for verb in ("inspect bare.ptl --strict", "relocate bare.ptl --to cuda:1 --strict"):
        assert told in run_cli(*verb.split(), exit=3).stderr, verb
    assert not made.exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_that_only_computes_is_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "phone.ptl"
    torch.jit.script(Restored())._save_for_lite_interpreter(str(path))
    assert b"__setstate__" in script_records(path)["bytecode.pkl"]
    assert not inspect(path, strict=True).unknown_callables
