"""A verdict is about all of a file: its tensors, its values, its code and whatever else it holds.

Files are changed in one place that means something, their checksums made right again; `equal` must
never be the answer then. And what relocating gives is equal to its source but for devices.
"""

from __future__ import annotations

import functools
import io
import json
import pickle
import pickletools
import random
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.package.package_exporter import PackageExporter

from ckptmove import Diff, Kind, RefusedError, convert, diff, inspect, relocate, validate
from ckptmove.errors import CheckFailed, InputError
from ckptmove.manifest.dtypes import BITS
from tests.conftest import RunCli, corpus_files
from tests.making.checkpoints import MAKERS, save
from tests.making.families import FAMILIES
from tests.making.relaying import rezipped

FILES = [(family, name) for family, makers in FAMILIES.items() for name in makers]
KINDS = (
    *("zip", "pickle", "legacy", "tar-legacy", "zip-container"),
    *("torchscript", "torchscript-lite", "torchscript-v1(json)"),
)
PUBLIC = [each for kind in KINDS for each in corpus_files(kind)]
#: What can't follow another device, so that relocating refuses it.
BOUND = {("exported", "aotinductor"), ("packaged", "script")}
#: What names one act of saving, or but the layout.
UNIMPORTANT = (
    *(".debug_pkl", ".data/serialization_id", "byteorder", ".format_version", "python_version"),
    *(".storage_alignment", ".data/version", "archive_version", "mobile_debug_handles.pkl"),
)


def made(family: str, name: str, path: Path, tag: str = "cuda:1") -> Path:
    FAMILIES[family][name](path, tag)
    return path


def appended(source: Path, path: Path, more: Mapping[str, bytes]) -> Path:
    """A file of torch's with further records, in its own folder."""
    rezipped(source, path, lambda _, content: content)
    with zipfile.ZipFile(path, "a") as archive:
        folder = archive.namelist()[0].partition("/")[0]
        for name, content in more.items():
            archive.writestr(f"{folder}/{name}", content)
    return path


class Module(torch.nn.Module):
    """A weight, a number, and some code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.times = 7

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@functools.cache
def scripted_module() -> Any:
    return torch.jit.script(Module())


def scripted(path: Path, by: float = 2.0, device: str = "cuda:0", **files: Any) -> Path:
    """A TorchScript program that multiplies by a number."""

    scripted_module().save(path, **files)
    body = f'torch.mul(x, {by})\n    y = torch.zeros([1], device=torch.device("{device}"))'
    return rezipped(
        path,
        path.with_suffix(".jit"),
        lambda name, content: (
            content.replace(b"return x", f"z = {body}\n    return z".encode())
            if name.endswith(".py")
            else content
        ),
    )


def differences(found: Diff) -> list[tuple[str, str]]:
    return [(str(each.kind), each.name) for each in found.differences]


# -- what relocating gives -----------------------------------------------------------------------


def assert_equal_but_for_devices(
    source: Path, there: Path, to: str = "cuda:3", **options: Any
) -> None:
    report = relocate(source, there, to=to, all=True, **options)
    alike = diff(source, there, ignore_devices=True)
    assert alike.equal, alike.differences[:3]
    assert report.warnings is not None
    assert diff(source, there).equal is (source.read_bytes() == there.read_bytes())
    against = validate(there, against=source).of("against")
    assert against.outcome == "passed", against


@pytest.mark.sample(18)
@pytest.mark.parametrize(("family", "name"), [each for each in FILES if each not in BOUND])
def test_what_was_relocated_is_its_source_but_for_devices(
    family: str, name: str, tmp_path: Path
) -> None:
    source = made(family, name, tmp_path / "made.pt")
    assert_equal_but_for_devices(source, tmp_path / "there.pt")


def test_so_is_a_mesh_on_meta(tmp_path: Path) -> None:
    """Its device is a bare string."""
    source = save(tmp_path / "made.pt", MAKERS["dtensor_state_dict"](), "cpu")
    assert_equal_but_for_devices(source, tmp_path / "there.pt", to="meta")


@pytest.mark.sample(18)
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_so_is_everything_that_torch_saves(name: str, tmp_path: Path) -> None:
    source = save(tmp_path / "made.pt", MAKERS[name](), "cuda:1")
    assert_equal_but_for_devices(source, tmp_path / "there.pt")


@pytest.mark.sample(3)
@pytest.mark.parametrize("path", PUBLIC)
def test_so_is_a_public_file(path: Path, tmp_path: Path) -> None:
    assert_equal_but_for_devices(path, tmp_path / "there.pt")


def test_devices_in_code_that_was_moved_too_are_let_pass(tmp_path: Path) -> None:
    source = scripted(tmp_path / "a.pt", device="cpu")
    report = relocate(source, tmp_path / "b.jit", to="cuda:3", all=True, values=True)
    assert [each.kind for each in report.values_rewritten] == ["code"]
    assert diff(source, tmp_path / "b.jit", ignore_devices=True).equal
    found = diff(source, tmp_path / "b.jit")
    assert ("record", "code/__torch__/tests/api/test_diff_whole.py") in differences(found)
    other = scripted(tmp_path / "c.pt", by=3.0, device="cuda:3")
    assert not diff(source, other, ignore_devices=True).equal


# -- one change, anywhere ------------------------------------------------------------------------

_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE")


def changed(name: str, content: bytes, dice: random.Random) -> bytes | None:
    """A record with one thing in it changed that means something, or None if there is none."""
    if not content:
        return None
    if content[:1] == b"\x80" and content[-1:] == b".":
        return changed_pickle(content, dice)
    if name.endswith((".json", ".py")):
        places = [
            n for n, byte in enumerate(content) if chr(byte).isascii() and chr(byte).isalnum()
        ]
        at = dice.choice(places)
        last = content[at] in b"9zZ"
        return content[:at] + bytes([content[at] + (-1 if last else 1)]) + content[at + 1 :]
    at = dice.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << dice.randrange(8)]) + content[at + 1 :]


def changed_pickle(content: bytes, dice: random.Random) -> bytes | None:
    places = []
    for opcode, argument, at in pickletools.genops(content):
        assert at is not None
        if opcode.name in _TEXTS and argument:
            places.append(at + (5 if opcode.name == "BINUNICODE" else 2))
    if not places:
        return None
    at = dice.choice(places)
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def is_noticed(source: Path, other: Path, **options: Any) -> bool:
    """Whether a comparison doesn't say that two files are equal."""
    try:
        return not diff(source, other, **options).equal
    except InputError:
        return True


ZIPPED = [file for file in FILES if file[0] in ("script", "exported", "packaged")]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "name"), ZIPPED)
def test_a_change_of_any_record_is_noticed(family: str, name: str, tmp_path: Path) -> None:
    source, other = made(family, name, tmp_path / "made.pt"), tmp_path / "other.pt"
    dice = random.Random(f"{family} {name}")
    with zipfile.ZipFile(source) as archive:
        names = [each for each in archive.namelist() if not each.endswith(UNIMPORTANT)]
    numbers = [each for each in names if each.rpartition("/")[2].isdecimal()]
    names = [each for each in names if each not in numbers and not is_tensors(each)]
    assert names
    for wanted in names:
        if wanted.endswith("/version") and family != "script":
            continue
        for _ in range(3):
            done: list[bool] = []

            def edit(record: str, content: bytes, wanted: str = wanted) -> bytes:
                new = changed(record, content, dice) if record == wanted else None
                done.append(new is not None)  # noqa: B023
                return content if new is None else new

            rezipped(source, other, edit)
            if any(done):
                assert is_noticed(source, other), wanted


def is_tensors(name: str) -> bool:
    """Whether a record holds elements, which not all may be seen, or is a zip of such."""
    return name.endswith((".storage", ".pt")) or "/weight_" in name or "/tensor_" in name


@pytest.mark.sample(3)
@pytest.mark.parametrize(("family", "name"), FILES)
def test_a_change_of_any_tensor_is_noticed(family: str, name: str, tmp_path: Path) -> None:
    source, other = made(family, name, tmp_path / "made.pt"), tmp_path / "other.pt"
    dice, manifest = random.Random(f"{family} {name}"), inspect(source)
    content = source.read_bytes()
    shown = [
        (storage.extent.start + entry.offset * BITS[entry.dtype] // 8, entry.nbytes)
        for entry in manifest.tensors
        for storage in [manifest.storages.get(entry.storage or "")]
        if storage is not None
        and storage.extent is not None
        and entry.nbytes
        and storage.extent.nbytes >= entry.nbytes
        and is_whole(entry)
    ]
    for start, nbytes in dice.sample(shown, min(6, len(shown))):
        at = start + dice.randrange(nbytes)
        bit = 0 if nbytes == 1 else dice.randrange(8)  # of a bool, only this counts
        damaged = content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
        other.write_bytes(damaged)
        assert is_noticed(source, other), at
        assert is_noticed(source, other, ignore_devices=True, ignore_code=True), at


def is_whole(entry: Any) -> bool:
    """Whether the elements of a tensor follow each other."""
    step = 1
    for n, stride in zip(reversed(entry.shape), reversed(entry.stride), strict=False):
        if n != 1 and stride != step:
            return False
        step *= n
    return entry.layout in ("strided", "storage")


# -- programs ------------------------------------------------------------------------------------


def test_other_code_is_shown(tmp_path: Path, run_cli: RunCli) -> None:
    one, two = scripted(tmp_path / "a.pt"), scripted(tmp_path / "b.pt", by=3.0)
    found = diff(one, two)
    (only,) = found.differences
    assert (only.kind, only.name) == (Kind.RECORD, "code/__torch__/tests/api/test_diff_whole.py")
    assert [line[0] for line in only.lines] == ["@", "-", "+"]
    assert "torch.mul(x, 2.0)" in only.lines[1]
    assert "torch.mul(x, 3.0)" in only.lines[2]
    assert diff(one, two, ignore_code=True).equal
    assert len(diff(one, two, ignore_code=True).ignored) == 1
    result = run_cli("diff", str(one), str(two), exit=1)
    assert "different: 1 record" in result.stdout
    assert "torch.mul(x, 3.0)" in result.stdout
    result = run_cli("diff", str(one), str(two), "--ignore-code", exit=0)
    assert "1 difference in code ignored" in result.stdout
    said = json.loads(run_cli("diff", "--json", str(one), str(two), exit=1).stdout)
    assert said["differences"][0]["lines"] == list(only.lines)


@pytest.mark.slow
def test_validate_knows_other_code(tmp_path: Path, run_cli: RunCli) -> None:
    one, two = scripted(tmp_path / "a.pt"), scripted(tmp_path / "b.pt", by=3.0)
    with pytest.raises(CheckFailed, match="differs from"):
        validate(two, against=one).raise_if_failed()
    validate(two, against=one, ignore_code=True).raise_if_failed()
    result = run_cli("validate", str(two), "--against", str(one), exit=1)
    assert "torch.mul(x, 3.0)" in result.stdout
    run_cli("validate", str(two), "--against", str(one), "--ignore-code", exit=0)
    for folder, file in (("ones", one), ("twos", two)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.jit").write_bytes(file.read_bytes())
    batch = ("batch", "validate", str(tmp_path / "twos"), "--against", str(tmp_path / "ones"))
    run_cli(*batch, "--jobs", "1", exit=1)
    run_cli(*batch, "--jobs", "1", "--ignore-code", exit=0)


def test_values_of_a_program_count(tmp_path: Path) -> None:
    one = scripted(tmp_path / "a.pt")
    two = rezipped(
        one,
        tmp_path / "b.jit",
        lambda name, content: (
            content.replace(b"K\x07", b"K\x08") if name.endswith("/data.pkl") else content
        ),
    )
    assert differences(diff(one, two)) == [("value", "times")]


def test_a_program_and_its_tensors_are_not_the_same(tmp_path: Path, run_cli: RunCli) -> None:
    source, there = scripted(tmp_path / "a.pt"), tmp_path / "there.safetensors"
    convert(source, there, drop="<its code>")
    found = diff(source, there)
    assert differences(found) == [("not compared", "<its code>")]
    assert found.only_not_compared
    assert diff(source, there, ignore_code=True).equal
    result = run_cli("diff", str(source), str(there), exit=1)
    assert "tensors equal: 1 tensor" in result.stdout
    assert "not compared: <its code>" in result.stdout
    assert "--ignore-code accepts that" in result.stderr
    run_cli("diff", str(source), str(there), "--ignore-code", exit=0)
    assert not validate(there, against=source).ok
    validate(there, against=source, ignore_code=True).raise_if_failed()
    validate(there, against=source, subset=True).raise_if_failed()
    assert not validate(source, against=there, subset=True).ok  # it has code that the other lacks


def test_debugging_and_identities_are_no_content(tmp_path: Path) -> None:
    source = scripted(tmp_path / "a.pt")

    def edit(name: str, content: bytes) -> bytes:
        return content[::-1] if name.endswith((".debug_pkl", "serialization_id")) else content

    assert diff(source, rezipped(source, tmp_path / "b.jit", edit)).equal


# -- other records -------------------------------------------------------------------------------

MORE = {"notes.txt": b"first\n", "extra/labels.json": b'{"a": 1}'}


def of_torch(path: Path) -> Path:
    torch.save({"w": torch.ones(3), "cpu": "cpu"}, path)
    return path


def packaged(path: Path) -> Path:
    with PackageExporter(path) as exporter:
        exporter.save_pickle("model", "state.pkl", {"w": torch.ones(3)})
    return path


HOLDERS: Mapping[str, Callable[[Path], Path]] = {
    "torch-zip": of_torch,
    "torchscript": scripted,
    "torch-package": packaged,
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_files_appended_to_a_zip_of_torch(kind: str, tmp_path: Path, run_cli: RunCli) -> None:
    source = appended(HOLDERS[kind](tmp_path / "a.pt"), tmp_path / "a.zip", MORE)
    assert inspect(source).format == kind
    for name, content in MORE.items():
        (record,) = [each for each in inspect(source).records if each.name == name]
        assert (str(record.kind), record.nbytes) == ("data", len(content))
    for options in ((), ("--tree",)):
        assert "notes.txt" in run_cli("inspect", str(source), *options, exit=0).stdout
    said = json.loads(run_cli("inspect", "--json", str(source), exit=0).stdout)
    assert {"name": "notes.txt", "kind": "data", "nbytes": 6} in said["records"]
    there = tmp_path / "there.safetensors"
    with pytest.raises(RefusedError, match=r"<record notes.txt>, which cannot be stored"):
        convert(source, there)
    report = convert(source, there, drop=("<record *>", "<its *>"))
    assert {f"<record {name}>" for name in MORE} <= {loss.name for loss in report.dropped}
    assert ("not compared", "notes.txt") in differences(diff(source, there))
    assert diff(source, there, ignore_code=True).equal
    plain = HOLDERS[kind](tmp_path / "c.pt")
    if kind != "torch-package":  # whose pickles have times
        assert differences(diff(source, plain)) == [("record removed", name) for name in MORE]
        assert differences(diff(plain, source)) == [("record added", name) for name in MORE]
    other = rezipped(
        source,
        tmp_path / "b.zip",
        lambda name, content: b"second\n\x1b[31m" if name.endswith("notes.txt") else content,
    )
    (only,) = diff(source, other).differences
    assert only.lines == ("@@ -1,1 +1,1 @@", "-first", "+second") or only.lines[1] == "-first"
    result = run_cli("diff", str(source), str(other), "--ignore-code", exit=1)
    assert "\x1b" not in result.stdout
    assert "+second" in result.stdout
    relocate(source, tmp_path / "moved.pt", to="cuda:3")
    assert diff(source, tmp_path / "moved.pt", ignore_devices=True).equal


def test_unlike_bytes_are_told_by_where_they_are(tmp_path: Path, run_cli: RunCli) -> None:
    source = appended(of_torch(tmp_path / "a.pt"), tmp_path / "a.zip", {"x.bin": bytes(100)})
    other = rezipped(
        source,
        tmp_path / "b.zip",
        lambda name, content: (
            bytes(60) + b"\xff" + bytes(39) if name.endswith("x.bin") else content
        ),
    )
    (only,) = diff(source, other).differences
    assert (only.old["at"], only.old["hex"], only.new["hex"]) == (60, "00" * 8, "ff" + "00" * 7)
    text = run_cli("diff", str(source), str(other), exit=1).stdout
    assert f"at 60: {'00' * 8} → ff{'00' * 7}" in text


def test_what_is_packed_too_tightly_is_still_compared(tmp_path: Path) -> None:
    paths = []
    for n, filling in enumerate((b"\0", b"\0", b"\1")):
        path = rezipped(of_torch(tmp_path / f"{n}.pt"), tmp_path / f"{n}.zip", lambda _, c: c)
        with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{archive.namelist()[0].partition('/')[0]}/big", filling * (8 << 20))
        paths.append(path)
    assert diff(paths[0], paths[1]).equal
    assert differences(diff(paths[0], paths[2])) == [("record", "big")]


def test_members_of_an_old_tar(tmp_path: Path) -> None:
    source = made("tar", sorted(FAMILIES["tar"])[0], tmp_path / "a.tar")
    other = tmp_path / "b.tar"
    other.write_bytes(source.read_bytes())
    with tarfile.open(other, "a") as archive:
        info = tarfile.TarInfo("notes.txt")
        info.size = 6
        archive.addfile(info, io.BytesIO(b"first\n"))
    assert [each.name for each in inspect(other).records] == ["sys_info", "notes.txt"]
    assert differences(diff(source, other)) == [("record added", "notes.txt")]
    with pytest.raises(RefusedError, match=r"<record notes.txt>"):
        convert(other, tmp_path / "there.pt")
    convert(source, tmp_path / "there.pt")


# -- checkpoints within bytes --------------------------------------------------------------------


def nested(path: Path, value: object, *, by: Callable[[object], bytes] | None = None) -> Path:
    """A pickle that holds a checkpoint in bytes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    path.write_bytes(pickle.dumps({"net": buffer.getvalue(), "n": 1}, protocol=4))
    return path


def test_what_is_in_bytes_is_compared_by_name(tmp_path: Path, run_cli: RunCli) -> None:
    one = nested(tmp_path / "a.pkl", {"w": torch.ones(3), "lr": 0.1})
    assert diff(one, nested(tmp_path / "b.pkl", {"w": torch.ones(3), "lr": 0.1})).equal
    other = nested(tmp_path / "c.pkl", {"w": torch.tensor([1.0, 2, 1]), "lr": 0.2})
    assert differences(diff(one, other)) == [("changed", "net.w"), ("value", "net.lr")]
    relocate(one, tmp_path / "d.pkl", to="cuda:3")
    assert differences(diff(one, tmp_path / "d.pkl")) == [("moved", "net.w")]
    result = run_cli("diff", str(one), str(tmp_path / "d.pkl"), "--ignore-devices", exit=0)
    assert "equal: 1 tensor" in result.stdout
    validate(tmp_path / "d.pkl", against=one).raise_if_failed()


def sides() -> Iterator[tuple[str, object, object]]:
    yield "bytes", b"a" * 9000 + b"b", b"a" * 9000 + b"c"
    yield "short bytes", b"a" * 60 + b"b" + b"a" * 60, b"a" * 60 + b"c" + b"a" * 60
    yield "text", "a" * 9000 + "b" + "a" * 90, "a" * 9000 + "c" + "a" * 90
    yield "short text", "a" * 100 + "b" + "a" * 90, "a" * 100 + "c" + "a" * 90
    yield "number", 1 << 9000, (1 << 9000) + 1
    yield "longer", b"a" * 9000, b"a" * 9001


@pytest.mark.parametrize(("old", "new"), [s[1:] for s in sides()], ids=[s[0] for s in sides()])
def test_two_sides_never_show_the_same(
    old: object, new: object, tmp_path: Path, run_cli: RunCli
) -> None:
    paths = []
    for name, value in (("a.pkl", old), ("b.pkl", new)):
        paths.append(tmp_path / name)
        paths[-1].write_bytes(pickle.dumps({"t": torch.ones(1), "value": value}, protocol=4))
    (only,) = diff(*paths).differences
    assert only.old != only.new
    (line,) = [
        each
        for each in run_cli("diff", *map(str, paths), exit=1).stdout.splitlines()
        if "→" in each
    ]
    before, after = line.split("→")
    assert before.split("value")[-1].strip() != after.strip()
