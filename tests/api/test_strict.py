"""`strict`: the same refusal by every verb, of whatever file names an unknown callable."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import ckptmove
from ckptmove import CorruptError, UnsupportedError, UntrustedError
from ckptmove.batches.options import VerbName
from tests.conftest import RunCli
from tests.formats.test_nemo import packed
from tests.formats.test_sharded import shards_of_torch
from tests.formats.test_torch_tar import members, write
from tests.making.bombs import zipped
from tests.making.payloads import LEGACY, Family, called, legacy_of, legacy_storage, name, text
from tests.making.tar import save_tar


class Runs:
    """What makes a folder when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


NAMED = f"{os.mkdir.__module__}.mkdir"

Verb = Callable[..., object]


def _relocate(source: Path, out: Path, **options: Any) -> object:
    return ckptmove.relocate(source, out / "out.pt", to="cpu", **options)


def _convert(source: Path, out: Path, **options: Any) -> object:
    return ckptmove.convert(source, out / "out.safetensors", **options)


def _load(source: Path, out: Path, **options: Any) -> object:
    return ckptmove.load(source, **options)


def _select(source: Path, out: Path, **options: Any) -> object:
    return ckptmove.load(source, select="weight", **options)


def _diff_a(source: Path, out: Path, **options: Any) -> object:
    return ckptmove.diff(source, out / "plain.pt", **options)


def _diff_b(source: Path, out: Path, **options: Any) -> object:
    return ckptmove.diff(out / "plain.pt", source, **options)


def _validate(source: Path, out: Path, **options: Any) -> object:
    return ckptmove.validate(source, **options)


def _against(source: Path, out: Path, **options: Any) -> object:
    return ckptmove.validate(out / "plain.pt", against=source, **options)


VERBS: dict[str, Verb] = {
    each.__name__.lstrip("_"): each
    for each in (_relocate, _convert, _load, _select, _diff_a, _diff_b, _validate, _against)
}
OF_SEVERAL_FILES = sorted(VERBS.keys() - {"relocate"})


def _zip(folder: Path, saved: object) -> Path:
    torch.save(saved, folder / "in.pt")
    return folder / "in.pt"


def _legacy(folder: Path, saved: object) -> Path:
    torch.save(saved, folder / "in.pt", _use_new_zipfile_serialization=False)
    return folder / "in.pt"


def _pickle(folder: Path, saved: object) -> Path:
    (folder / "in.pkl").write_bytes(pickle.dumps(saved))
    return folder / "in.pkl"


FILES = {each.__name__.lstrip("_"): each for each in (_zip, _legacy, _pickle)}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder to write to, with a checkpoint that names nothing unknown."""
    (tmp_path / "out").mkdir()
    torch.save({"weight": torch.ones(2)}, tmp_path / "out" / "plain.pt")
    return tmp_path / "out"


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize("verb", VERBS)
def test_an_unknown_callable_is_refused(verb: str, form: str, tmp_path: Path, out: Path) -> None:
    saved = {"weight": torch.ones(2), "more": Runs(tmp_path / "canary")}
    source = FILES[form](tmp_path, saved)
    with pytest.raises(UntrustedError, match=NAMED) as raised:
        VERBS[verb](source, out, strict=True)
    assert (raised.value.exit_code, raised.value.path) == (3, str(source))
    assert raised.value.hint is not None
    assert not (tmp_path / "canary").exists()
    assert [path.name for path in out.iterdir()] == ["plain.pt"]
    VERBS[verb](FILES[form](tmp_path, {"weight": torch.ones(2)}), out, strict=True)


@pytest.mark.parametrize("verb", OF_SEVERAL_FILES)
def test_every_file_of_several_counts(verb: str, tmp_path: Path, out: Path) -> None:
    parts = [{"weight": torch.ones(2)}, {"more": Runs(tmp_path / "canary"), "b": torch.ones(1)}]
    source = shards_of_torch(tmp_path / "in", *parts)
    with pytest.raises(UntrustedError, match=NAMED):
        VERBS[verb](source, out, strict=True)
    assert not (tmp_path / "canary").exists()
    VERBS[verb](shards_of_torch(tmp_path / "plain", parts[0]), out, strict=True)


def test_load_still_refuses_what_would_stay_opaque(tmp_path: Path) -> None:
    """A name that is known, of which nothing is made."""
    source = _zip(tmp_path, {"weight": torch.ones(2), "kept": Shard(0)})
    assert ckptmove.inspect(source).unknown_callables == ()
    with pytest.raises(ckptmove.UnsupportedError, match="Shard"):
        ckptmove.load(source, strict=True)


def _folder(tmp_path: Path, beside: object) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({"weight": torch.ones(2)}, folder / "pytorch_model.bin")
    (folder / "config.json").write_text("{}")
    (folder / "vocab.txt").write_text("[PAD]\n(a)\n.")
    (folder / "empty").touch()
    if beside is not None:
        torch.save(beside, folder / "training_args.bin")
    return folder


def test_what_is_copied_from_a_folder_counts(tmp_path: Path) -> None:
    folder, to = _folder(tmp_path, Runs(tmp_path / "canary")), tmp_path / "to"
    with pytest.raises(UntrustedError, match=NAMED) as raised:
        ckptmove.convert(folder, f"{to}/", format="safetensors", strict=True)
    assert raised.value.path == str(folder / "training_args.bin")
    assert not to.exists()
    (folder / "training_args.bin").write_bytes(pickle.dumps(Runs(tmp_path / "canary")))
    with pytest.raises(UntrustedError, match=NAMED):
        ckptmove.convert(folder, f"{to}/", format="safetensors", strict=True)
    (folder / "training_args.bin").write_bytes(b"\x80\x02no pickle")
    with pytest.raises(CorruptError):
        ckptmove.convert(folder, f"{to}/", format="safetensors", strict=True)
    ckptmove.convert(folder, f"{to}/", format="safetensors")
    (folder / "training_args.bin").unlink()
    ckptmove.convert(folder, f"{to}2/", format="safetensors", strict=True)


def test_a_verdict_on_a_folder_is_about_what_lies_beside_its_weights(tmp_path: Path) -> None:
    folder, plain = _folder(tmp_path, Runs(tmp_path / "canary")), tmp_path / "plain"
    shutil.copytree(folder, plain)
    (plain / "training_args.bin").unlink()
    assert ckptmove.inspect(folder).unknown_callables == (NAMED,)
    for verb in (
        lambda: ckptmove.validate(folder, strict=True),
        lambda: ckptmove.validate(plain, against=folder, strict=True),
        lambda: ckptmove.diff(folder, plain, strict=True),
        lambda: ckptmove.diff(plain, folder, strict=True),
        lambda: ckptmove.convert(folder, tmp_path / "one.pt", strict=True),
        lambda: ckptmove.convert(folder, tmp_path / "one.safetensors", strict=True),
        lambda: ckptmove.load(folder, strict=True),
    ):
        with pytest.raises(UntrustedError, match=NAMED):
            verb()
    ckptmove.convert(plain, tmp_path / "one.pt", strict=True)
    ckptmove.validate(plain, strict=True).raise_if_failed()


@pytest.mark.parametrize("at", range(5))
def test_every_pickle_of_a_legacy_file_in_bytes_counts(at: int, tmp_path: Path) -> None:
    """Whether or not it can be read: whoever loads the bytes runs it."""
    runs = Family(called(name("os", "mkdir"), text("canary")))
    inner = runs.beside(legacy_storage("0")) if at == 3 else runs.instead_of(LEGACY[at])
    source = tmp_path / "in.pt"
    torch.save({"weight": torch.ones(2), "saved": legacy_of(at, inner)}, source)
    assert ckptmove.inspect(source).unknown_callables == ("os.mkdir",)
    with pytest.raises(UntrustedError, match=r"os\.mkdir"):
        ckptmove.validate(source, strict=True)


def test_bytes_that_are_broken_may_hold_anything(tmp_path: Path) -> None:
    runs = Family(called(name("os", "mkdir"), text("canary")))
    storage_lost = legacy_of(3, runs.instead_of(LEGACY[3]))
    broken_zip = zipped(runs.beside(b"")).replace(b"archive/data.pkl", b"archive/data.PKL", 1)
    for inner, names in (
        (storage_lost, ("os.mkdir",)),
        (broken_zip, ("(in bytes that can't be read)",)),
    ):
        torch.save({"weight": torch.ones(2), "saved": inner}, tmp_path / "in.pt")
        assert ckptmove.inspect(tmp_path / "in.pt").unknown_callables == names
        with pytest.raises(UntrustedError):
            ckptmove.inspect(tmp_path / "in.pt", strict=True)


def test_the_command_line(tmp_path: Path, out: Path, run_cli: RunCli) -> None:
    source = _zip(tmp_path, {"weight": torch.ones(2), "more": Runs(tmp_path / "canary")})
    plain = out / "plain.pt"
    commands: list[list[str | Path]] = [
        ["convert", source, tmp_path / "x.safetensors"],
        ["diff", source, plain],
        ["diff", plain, source],
        ["validate", source],
        ["validate", plain, "--against", source],
        ["relocate", source, tmp_path / "x.pt", "--to", "cpu"],
    ]
    for command in commands:
        done = run_cli(*command, "--strict", exit=3)
        assert done.stdout == ""
        assert done.stderr.startswith(f"ckptmove: {source}: names unknown callables: {NAMED}")
        assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("x.*"))
    assert not (tmp_path / "canary").exists()


def test_what_is_never_relocated_is_refused_as_that(tmp_path: Path) -> None:
    source = tmp_path / "in.safetensors"
    unsafe = _zip(tmp_path, {"w": torch.ones(2), "more": Runs(tmp_path / "canary")})
    ckptmove.convert(unsafe, source)
    for strict in (False, True):
        with pytest.raises(UnsupportedError, match="store no devices"):
            ckptmove.relocate(source, tmp_path / "x.pt", to="cpu", strict=strict)


def test_the_line_is_short_whatever_the_names(tmp_path: Path, run_cli: RunCli) -> None:
    names = "".join(f"cos\n{'é' * 400}{n}\n0" for n in range(50))
    (tmp_path / "in.pkl").write_bytes(b"\x80\x02" + names.encode() + b"}.")
    done = run_cli("convert", "in.pkl", "x.safetensors", "--strict", exit=3)
    assert "and 47 more" in done.stderr
    assert len(done.stderr.encode()) <= 300


@pytest.mark.sample(1)
@pytest.mark.parametrize("verb", ["convert", "relocate", "validate"])
def test_in_a_batch_it_is_said_of_each_item(verb: VerbName, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    shutil.move(_zip(tmp_path, {"w": torch.ones(1), "more": Runs(tmp_path / "canary")}), tree)
    torch.save({"w": torch.ones(1)}, tree / "plain.pt")
    options: dict[str, Any] = {"strict": True} | ({"to": "cpu"} if verb == "relocate" else {})
    batch = ckptmove.batch(verb, tree, tmp_path / "to", jobs=1, **options)
    found = {result.name: result for result in batch}
    assert (found["in.pt"].outcome, found["plain.pt"].outcome) == ("refused", "done")
    assert NAMED in found["in.pt"].reason
    assert not (tmp_path / "canary").exists()


def test_in_a_batch_other_files_count(tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "args.pkl").write_bytes(pickle.dumps(Runs(tmp_path / "canary")))
    (tmp_path / "tree" / "notes.txt").write_text("notes")
    torch.save({"w": torch.ones(1)}, tmp_path / "tree" / "plain.pt")
    command = ["batch", "convert", "tree", "to", "--copy-rest", "--jobs=1", "--json"]
    done = run_cli(*command, "--strict", exit=1)
    assert NAMED in done.stdout
    assert sorted(path.name for path in (tmp_path / "to").glob("[a-z]*")) == [
        "notes.txt",
        "plain.safetensors",
    ]


_RUNS = Family(called(name("os", "mkdir"), text("canary")))


@pytest.mark.parametrize("container", ["nemo", "tar", "the end of a table"])
@pytest.mark.parametrize("form", ["pickle", "zip", "legacy", "keys of legacy"])
def test_members_of_a_tar_that_are_passed_over_count(
    container: str, form: str, tmp_path: Path
) -> None:
    """A program may load what the library that wrote the tar does not, as from a zip."""
    content = {
        "pickle": pickle.dumps(Runs(tmp_path / "canary")),
        "zip": zipped(_RUNS.beside(b"")),
        "legacy": legacy_of(3, _RUNS.beside(legacy_storage("0"))),
        "keys of legacy": legacy_of(4, _RUNS.instead_of(LEGACY[4])),
    }[form]
    path = tmp_path / "in.tar"
    if container == "nemo":
        weights = zipped(b"\x80\2}.")
        packed(path, [("model_weights.ckpt", weights), ("model_config.yaml", b"a: 1\n")])
        inspected = ckptmove.inspect(path).unknown_callables
        packed(path, [("model_weights.ckpt", weights), ("extra.pkl", content)])
    else:
        save_tar({"w": torch.ones(2)}, path, lambda _: "cpu")
        inspected, held = ckptmove.inspect(path).unknown_callables, members(path)
        if container == "tar":
            held["sys_info"] = content
        else:
            held["tensors"] += content
        write(path, held)
    assert inspected == ()
    assert {"os.mkdir", NAMED} & {*ckptmove.inspect(path).unknown_callables}
    for verb in (
        lambda: ckptmove.relocate(path, tmp_path / "out.tar", to="cuda:0", strict=True),
        lambda: ckptmove.convert(path, tmp_path / "out.pt", drop="<record *", strict=True),
        lambda: ckptmove.load(path, strict=True),
    ):
        with pytest.raises(UntrustedError, match="mkdir"):
            verb()
