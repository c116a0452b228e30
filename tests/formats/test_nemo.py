"""Models of NeMo: weights are read within the tar, and what can't be read is refused in a line."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptmove
from ckptmove import CheckFailed, CorruptError, InputError, UnsupportedError, inspect, relocate
from tests.conftest import RunCli
from tests.making.nemo import nemo_model, restored_by_nemo, saved_by_nemo
from tests.oracles.sameness import assert_same_tree


def unpacked(path: Path, into: Path) -> Path:
    """The folder that the standard library makes of a tar."""
    with tarfile.open(path, "r:") as tar:
        tar.extractall(into, filter="data")
    return into


def packed(path: Path, members: list[tarfile.TarInfo | tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w:") as tar:
        for each in members:
            if isinstance(each, tarfile.TarInfo):
                tar.addfile(each)
            else:
                info = tarfile.TarInfo(each[0])
                info.size = len(each[1])
                tar.addfile(info, io.BytesIO(each[1]))
    return path


def weights() -> bytes:
    torch.save({"w": torch.arange(4.0)}, out := io.BytesIO())
    return out.getvalue()


def test_the_weights_are_read_where_they_lie(tmp_path: Path) -> None:
    state = nemo_model(path := tmp_path / "m.nemo", "cuda:0")
    manifest = inspect(path)
    assert manifest.format == "nemo"
    assert {each.name for each in manifest.tensors} == set(state)
    assert set(manifest.devices) == {"cuda:0"}
    names = [each.name for each in manifest.records]
    assert {"model_config.yaml", "tokenizer/vocab.txt"} <= set(names)
    assert_same_tree(ckptmove.load(path, "cpu"), state)
    assert not list(tmp_path.glob("*/"))


def test_it_is_converted_compared_and_checked(tmp_path: Path, run_cli: RunCli) -> None:
    state = nemo_model(path := tmp_path / "m.nemo")
    ckptmove.convert(path, tmp_path / "m.safetensors", drop=["<record *"])
    found = load_file(tmp_path / "m.safetensors")
    assert_same_tree({name: found.pop(name) for name in state}, state)
    assert not found
    assert ckptmove.diff(path, path).equal
    torch.save(state, tmp_path / "m.pt")
    run_cli("diff", path, tmp_path / "m.pt", exit=1)
    assert "torch does not load nemo" in run_cli("validate", path, exit=0).stdout
    content = bytearray(path.read_bytes())
    at = content.index(state["0.weight"].numpy().tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert "0" in run_cli("validate", path, exit=1).stdout


@pytest.mark.parametrize("to", ["cuda:0", "cpu", "privateuseone:15"])
def test_it_goes_anywhere_and_back(to: str, tmp_path: Path) -> None:
    nemo_model(path := tmp_path / "m.nemo", "cuda:1")
    relocate(path, moved := tmp_path / "moved.nemo", to=to)
    assert set(inspect(moved).devices) == {to}
    old, new = unpacked(path, tmp_path / "old"), unpacked(moved, tmp_path / "new")
    for each in old.rglob("*"):
        same = new / each.relative_to(old)
        if each.name != "model_weights.ckpt" and each.is_file():
            assert same.read_bytes() == each.read_bytes()
    assert set(inspect(new / "model_weights.ckpt").devices) == {to}
    relocate(moved, back := tmp_path / "back.nemo", to="cuda:1")
    assert set(inspect(back).devices) == {"cuda:1"}
    again = unpacked(back, tmp_path / "again") / "model_weights.ckpt"
    assert ckptmove.diff(again, old / "model_weights.ckpt").equal


def test_nemo_restores_what_it_saved_elsewhere(tmp_path: Path) -> None:
    saved_by_nemo(path := tmp_path / "m.nemo", "cuda:1")
    assert set(inspect(path).devices) == {"cuda:1"}
    relocate(path, moved := tmp_path / "moved.nemo", to="cuda:0")
    relocate(moved, back := tmp_path / "back.nemo", to="cuda:1")
    assert back.read_bytes() == path.read_bytes()
    relocate(path, to="cpu", in_place=True)
    state = restored_by_nemo(back)
    assert_same_tree(restored_by_nemo(path), state)
    ckptmove.convert(back, safe := tmp_path / "m.safetensors", drop="<record *")
    assert_same_tree(ckptmove.load(safe, "cpu"), state)
    path.write_bytes(path.read_bytes()[:-5000])
    assert not ckptmove.validate(path).ok


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_are_read_as_tars_spell_them(form: int, tmp_path: Path) -> None:
    name = f"{'tokenizer/' * 14}{'v' * 40}.txt"
    with tarfile.open(path := tmp_path / "m.nemo", "w:", format=form) as tar:
        for each, content in ((name, b"a b"), ("model_weights.ckpt", weights())):
            info = tarfile.TarInfo(f"./{each}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    assert name in {each.name for each in inspect(path).records}
    relocate(path, moved := tmp_path / "moved.nemo", to="privateuseone:15")
    assert set(inspect(moved).devices) == {"privateuseone:15"}
    assert (unpacked(moved, tmp_path / "new") / name).read_bytes() == b"a b"
    odd = bytearray(path.read_bytes())
    odd[257:263] = b"ustar "  # then readers disagree on the prefix
    odd[345] = odd[345] or 97
    odd[148:156] = b"%06o\0 " % (sum(odd[:148]) + sum(odd[156:512]) + 8 * 32)
    path.write_bytes(odd)
    with pytest.raises(InputError, match="not a regular file"):
        inspect(path)


def test_a_device_can_be_required(tmp_path: Path) -> None:
    nemo_model(path := tmp_path / "m.nemo", "cuda:0")
    with pytest.raises(CheckFailed, match="is on cuda:0"):
        inspect(path, require="cpu")


def link(kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo("./model_config.yaml")
    info.type, info.linkname = kind, "/etc/passwd"
    return info


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("../model_config.yaml", b""), r"the member '\.\./model_config\.yaml', which leads elsew"),
        (("./a/../../b", b""), "leads elsewhere"),
        (("/etc/b", b""), "leads elsewhere"),
        (("c:b", b""), "leads elsewhere"),
        (("a\\b", b""), "leads elsewhere"),
        (("model_weights.ckpt", b"x"), "two members 'model_weights.ckpt'"),
        ((".//model_weights.ckpt", b"x"), "leads elsewhere"),
        (link(tarfile.SYMTYPE), "not a regular file"),
        (link(tarfile.LNKTYPE), "not a regular file"),
        (link(tarfile.FIFOTYPE), "not a regular file"),
        (("./model_weights/.metadata", b"x"), "distributed checkpoint in it: model_weights/"),
    ],
)
def test_odd_members_are_refused(
    more: tarfile.TarInfo | tuple[str, bytes], told: str, tmp_path: Path
) -> None:
    path = packed(tmp_path / "m.nemo", [("./model_weights.ckpt", weights()), more])
    with pytest.raises(InputError, match=told):
        inspect(path)


def test_weights_in_parts_are_refused(tmp_path: Path) -> None:
    parts = [(f"./mp_rank_0{n}/model_weights.ckpt", weights()) for n in range(2)]
    path = packed(tmp_path / "m.nemo", [*parts])
    with pytest.raises(UnsupportedError, match="weights are in parts, such as 'mp_rank_00"):
        inspect(path)
    path = packed(tmp_path / "m.nemo", [("./model_weights/common.pt", weights())])
    with pytest.raises(UnsupportedError, match="distributed checkpoint"):
        inspect(path)


def test_no_weights_and_no_configuration(tmp_path: Path) -> None:
    path = packed(tmp_path / "m.nemo", [("./model_weights.ckpt", b"no checkpoint")])
    with pytest.raises(CorruptError, match=r"model_weights\.ckpt in it is no checkpoint"):
        inspect(path)
    path = packed(tmp_path / "m.nemo", [("./model_weights.ckpt", weights())])
    assert inspect(path).warnings == ("there is no model_config.yaml in it, which NeMo needs",)


def test_compressed_ones_are_refused_with_a_hint(tmp_path: Path, run_cli: RunCli) -> None:
    nemo_model(tmp_path / "m.nemo", compressed=True)
    done = run_cli("inspect", "m.nemo", exit=3, cwd=tmp_path)
    assert "is compressed with gzip" in done.stderr
    assert "gunzip" in done.stderr


def test_cut_and_damaged_ones_give_a_line(tmp_path: Path) -> None:
    nemo_model(path := tmp_path / "m.nemo")
    content = path.read_bytes()
    for at in range(0, content.rindex(b"ustar"), 512):
        path.write_bytes(content[:at])
        with pytest.raises(InputError) as error:
            inspect(path)
        assert "\n" not in str(error.value)
