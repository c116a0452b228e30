"""save(): what torch.save would have written, in any format, whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckptmove
from ckptmove import RefusedError, UnsupportedError, UsageError
from tests.making.checkpoints import MAKERS
from tests.oracles.readers import assert_sound_zip, load, loads_safely
from tests.oracles.sameness import assert_same_tree
from tests.whole.test_memory import PROJECT

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


@pytest.mark.sample(25)
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_it_loads_as_what_torch_saves(name: str, tmp_path: Path) -> None:
    saved, theirs, ours = MAKERS[name](), tmp_path / "theirs.pt", tmp_path / "ours.pt"
    torch.save(saved, theirs)
    ckptmove.save(saved, ours)
    assert_sound_zip(ours)
    safe = loads_safely(theirs)
    assert loads_safely(ours) is safe
    assert_same_tree(load(theirs, weights_only=safe), load(ours, weights_only=safe))


def test_storages_of_nobody_else_are_kept_until_they_are_written(tmp_path: Path) -> None:
    class Lent:
        def __init__(self, n: int) -> None:
            self.n = n

        def __reduce__(self) -> tuple[object, ...]:
            return list, ((torch.full((1 << 16,), self.n),),)

    path = tmp_path / "saved.pt"
    ckptmove.save([Lent(n) for n in range(20)], path)
    loaded = load(path, weights_only=False)
    assert isinstance(loaded, list)
    assert [each[0].unique().tolist() for each in loaded] == [[n] for n in range(20)]


def test_safetensors(tmp_path: Path) -> None:
    saved = {"a": torch.arange(3.0), "b": torch.ones(2, 2).T}
    ckptmove.save(saved, tmp_path / "bare.safetensors", bare=True, metadata={"k": "v"})
    loaded = safetensors.torch.load_file(tmp_path / "bare.safetensors")
    assert all(loaded[name].equal(tensor) for name, tensor in saved.items())
    tree = {"model": saved, "epoch": 3, "again": saved["a"], 7: (1, None)}
    ckptmove.save(tree, tmp_path / "whole.safetensors")
    made = ckptmove.load(tmp_path / "whole.safetensors", strict=True)
    assert list(made) == list(tree)
    assert made["again"] is made["model"]["a"]
    assert made[7] == (1, None)


def test_a_folder_of_shards(tmp_path: Path) -> None:
    saved = {f"t{n}": torch.full((1000,), n) for n in range(5)}
    ckptmove.save(saved, tmp_path / "model", format="safetensors", max_shard_size="20KB")
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(shards) == 3
    loaded: dict[str, torch.Tensor] = {}
    for each in shards:
        loaded |= safetensors.torch.load_file(each)
    assert all(loaded[name].equal(tensor) for name, tensor in saved.items())
    assert (tmp_path / "model" / "model.safetensors.index.json").is_file()


def test_nothing_is_overwritten_unless_it_is_to_be(tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    path.write_bytes(b"mine")
    with pytest.raises(RefusedError):
        ckptmove.save([torch.ones(1)], path)
    assert path.read_bytes() == b"mine"
    ckptmove.save([torch.ones(1)], path, force=True)
    assert loads_safely(path)
    with pytest.raises(UsageError):
        ckptmove.save([], tmp_path / "saved.txt")


class Unwilling:
    def __reduce__(self) -> tuple[object, ...]:
        raise KeyError("mine")


def test_what_cannot_be_pickled_leaves_nothing(tmp_path: Path) -> None:
    recursive: list[object] = []
    for _ in range(100_000):
        recursive = [recursive]
    with Path(os.devnull).open() as file:
        for bad in (lambda: 0, file, recursive):
            with pytest.raises(UnsupportedError, match="it can't be pickled: "):
                ckptmove.save({"tensor": torch.ones(3), "bad": bad}, tmp_path / "saved.pt")
    with pytest.raises(KeyError, match="mine"):  # as torch.save: what an object raises is its own
        ckptmove.save(Unwilling(), tmp_path / "saved.pt")
    with pytest.raises(UnsupportedError, match="meta device has no bytes"):
        ckptmove.save(torch.empty(2, device="meta").untyped_storage(), tmp_path / "saved.pt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_it_is_as_open_as_any_new_file(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        ckptmove.save([torch.ones(1)], tmp_path / "ours.pt")
        torch.save([torch.ones(1)], tmp_path / "theirs.pt")
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode for name in ("ours.pt", "theirs.pt")]
    assert modes[0] == modes[1]


_GROWTH = """
import sys, threading, time, torch, ckptmove
def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(l.split()[1]) for l in lines if l.startswith("RssAnon"))
ckptmove.save([torch.ones(1)], sys.argv[1])
tensor = torch.ones(512 << 20, dtype=torch.uint8)
before = most = anonymous()
def watch():
    global most
    while not done:
        most = max(most, anonymous())
        time.sleep(0.002)
done = False
thread = threading.Thread(target=watch)
thread.start()
ckptmove.save({"a": tensor, "b": tensor[5:]}, sys.argv[2])
done = True
thread.join()
print(most - before)
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is told by Linux only")
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_tensors_are_not_copied(suffix: str, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{name}.{suffix}") for name in ("small", "large")]
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", _GROWTH, *paths]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 30_000_000


# -- what is loaded inert --------------------------------------------------------------------------


class Runs:
    """What makes a folder when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.made),)


class Own:
    """A class of the user's."""

    class Inner:
        """One within."""

        kind = 1


def inert(tmp_path: Path) -> dict[str, object]:
    torch.save({"w": torch.ones(1), "run": [Runs(tmp_path / "made")]}, tmp_path / "bad.pt")
    made = ckptmove.load(tmp_path / "bad.pt")
    assert isinstance(made, dict)
    return made


def test_what_is_inert_is_written_only_if_it_is_trusted(tmp_path: Path) -> None:
    made, out = inert(tmp_path), tmp_path / "out.pt"
    with pytest.raises(RefusedError, match=r"posix\.mkdir at 'run\.0'$") as raised:
        ckptmove.save(made, out)
    assert "trust_objects=True" in str(raised.value.hint)
    assert not out.exists()
    ckptmove.save(made, tmp_path / "inert.safetensors")
    ckptmove.save(made, out, trust_objects=True)
    for path in (out, tmp_path / "bad.pt"):
        assert ckptmove.inspect(path).unknown_callables == ("posix.mkdir",)
    assert not (tmp_path / "made").exists()
    load(out, weights_only=False)
    assert (tmp_path / "made").is_dir()


def test_ways_to_hide_what_runs(tmp_path: Path) -> None:
    run = ckptmove.Opaque("posix.mkdir", (str(tmp_path / "made"),))
    mkdir = ckptmove.Opaque("posix.mkdir")
    for hidden in (
        run,
        mkdir,
        ckptmove.Opaque("", ("x",), function=mkdir),
        ckptmove.Opaque("builtins.getattr", (ckptmove.Opaque("posix"), "mkdir")),
        ckptmove.Opaque("collections.OrderedDict", (run,)),
        {mkdir: 1},
        (1, {run}),
        Own.Inner,
    ):
        saved = {"w": torch.ones(1), "own": Own(), "a": hidden}
        if hidden is Own.Inner:
            ckptmove.save(saved, tmp_path / "own.pt")  # as torch does
        else:
            with pytest.raises(RefusedError, match=r"at 'a"):
                ckptmove.save(saved, tmp_path / "out.pt")
    loaded: Any = load(tmp_path / "own.pt", weights_only=False)
    assert loaded["a"] is Own.Inner


@pytest.mark.sample(25)
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_what_is_loaded_and_saved_is_what_it_was(name: str, tmp_path: Path) -> None:
    path, again = tmp_path / "saved.pt", tmp_path / "again.pt"
    torch.save(MAKERS[name](), path)
    made = ckptmove.load(path)
    ckptmove.save(made, again, trust_objects=True)
    safe = loads_safely(path)
    assert_same_tree(load(path, weights_only=safe), load(again, weights_only=safe))
    assert "ckptmove" not in str(ckptmove.inspect(again).globals)
