"""inspect lists every tensor that torch.load would give, as it would, and runs nothing."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from ckptmove import CheckFailed, Manifest, TensorEntry, UnsupportedError, inspect
from tests.conftest import ROOT, examples
from tests.making.checkpoints import MAKERS, UNLABELLED, kept_on_cpu, rezip, save, save_tagged
from tests.making.objects import Metric, Settings
from tests.making.strategies import Checkpoint, checkpoint_trees
from tests.making.wrapped import WRAPPED_MAKERS
from tests.oracles.census import Census, facts, storage_of
from tests.oracles.readers import labels, load, pid_locations

Made = Callable[..., tuple[Path, Manifest]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A maker's name → the file as training on cuda:0 saves it, and its manifest."""
    folder = tmp_path_factory.mktemp("made")

    @functools.cache
    def make(name: str, protocol: int = 2) -> tuple[Path, Manifest]:
        saved = MAKERS[name]()
        path = folder / f"{name}.{protocol}.pt"
        save(path, saved, keep_cpu=kept_on_cpu(saved), pickle_protocol=protocol)
        return path, inspect(path)

    return make


@pytest.mark.sample(61)
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", MAKERS)
def test_every_tensor_is_as_torch_loads_it(name: str, protocol: int, made: Made) -> None:
    path, manifest = made(name, protocol)
    assert_agrees(path, manifest, load(path, weights_only=False))


def assert_agrees(path: Path, manifest: Manifest, loaded: object) -> None:
    """The manifest lists what is in the loaded object, all of it, with all its facts."""
    census = Census(loaded)
    assert [entry.path for entry in manifest.tensors] == [found.path for found in census.found]
    locations = {f"data/{key}": location for key, location in pid_locations(path)}
    assert {key: each.location for key, each in manifest.storages.items()} == locations
    content = path.read_bytes()
    for entry, found in zip(manifest.tensors, census.found, strict=True):
        assert entry.name == spelled(entry.path)
        assert entry.part_of == (None if found.part_of is None else spelled(found.part_of))
        if isinstance(found.value, torch.Tensor):
            assert facts_of(entry) == facts(found.value), entry.name
        assert_same_storage(entry, manifest, found.value, content)
    assert_same_sharing(manifest, census)
    aliases = {alias.name: alias.of for alias in manifest.aliases}
    for again, before in census.again():
        assert aliases[spelled(again)] == spelled(before)


def spelled(path: tuple[object, ...]) -> str:
    """A path as a name; in a module that was saved whole, as in its state dict."""
    keys = [key for key in path if key not in ("_modules", "_parameters", "_buffers")]
    return ".".join(map(str, keys)) if path else "(root)"


def facts_of(entry: TensorEntry) -> dict[str, object]:
    """What `facts` says of a real tensor."""
    names = ("dtype", "shape", "stride", "offset", "requires_grad", "kind", "layout", "nbytes")
    return {name: getattr(entry, name) for name in names}


def assert_same_storage(entry: TensorEntry, manifest: Manifest, value: Any, file: bytes) -> None:
    """It has a storage if the real one has, with these bytes, at this place of the file."""
    real = storage_of(value)
    assert (entry.storage is None) == (real is None), entry.name
    if entry.storage is None or real is None:
        return
    storage = manifest.storages[entry.storage]
    assert storage.nbytes == real.nbytes()
    assert storage.location == entry.device
    assert storage.extent is not None
    kept = torch.empty(0, dtype=torch.uint8).set_(real).numpy().tobytes()
    assert file[storage.extent.start : storage.extent.end] == kept, entry.name


def assert_same_sharing(manifest: Manifest, census: Census) -> None:
    """Two entries have one storage if and only if the tensors have; `shared_with` says so."""
    ours: dict[str, list[str]] = defaultdict(list)
    theirs: dict[int, list[str]] = defaultdict(list)
    for entry, found in zip(manifest.tensors, census.found, strict=True):
        real = storage_of(found.value)
        if entry.storage is not None and real is not None and real.nbytes():
            ours[entry.storage].append(entry.name)
            theirs[real._cdata].append(entry.name)
    assert list(ours.values()) == list(theirs.values())
    for entry in manifest.tensors:
        names = ours.get(entry.storage or "", [])
        if names and len(set(names)) == len(names):
            assert list(entry.shared_with) == [n for n in names if n != entry.name][:16]


@pytest.mark.sample(60)
@pytest.mark.parametrize("name", sorted(MAKERS.keys() - UNLABELLED))
def test_devices_are_the_labels_that_torch_reads(name: str, made: Made) -> None:
    path, manifest = made(name)
    wanted = labels(path)
    listed = {entry.name: entry.device for entry in manifest.tensors}
    assert {listed[key] for key in wanted if key in listed} <= set(wanted.values())
    for key in wanted.keys() & listed.keys():
        assert listed[key] == wanted[key], key


@pytest.mark.parametrize("name", MAKERS)
def test_no_two_tensors_are_under_one_path(name: str, made: Made) -> None:
    _, manifest = made(name)
    paths = Counter(entry.path for entry in manifest.tensors)
    assert [path for path, count in paths.items() if count > 1] == []


SHARED: dict[str, object] = {
    "list": [torch.ones(1)],
    "dict": {"weight": torch.ones(1)},
    "tuple": (torch.ones(1), 2),
    "named tuple": Metric("loss", torch.ones(1)),
    "object": Settings("", torch.device("cpu"), torch.ones(1)),
    "module": torch.nn.Linear(1, 1),
}


@pytest.mark.parametrize("what", SHARED)
def test_what_holds_tensors_and_is_met_again_is_an_alias(what: str, tmp_path: Path) -> None:
    path = save(tmp_path / "made.pt", {"first": SHARED[what], "second": [SHARED[what]]})
    assert [tuple(alias) for alias in inspect(path).aliases] == [("second.0", "first")]


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=checkpoint_trees())
def test_random_trees_are_as_torch_loads_them(made: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "made.pt"
    tags = save_tagged(made.tree, path, made.tag)
    manifest = inspect(path)
    assert_agrees(path, manifest, load(path, weights_only=True))
    assert {each.location for each in manifest.storages.values()} == set(tags.values())
    assert manifest.unknown_callables == ()
    json.dumps(manifest.to_json(), allow_nan=False)


class ThroughCpu:
    """Pickled as an XLA tensor is."""

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild = torch._utils._rebuild_device_tensor_from_cpu_tensor
        return rebuild, (torch.ones(2), torch.float32, "xla:0", False)


def test_a_tensor_saved_through_the_cpu_is_on_the_device_that_it_names(tmp_path: Path) -> None:
    manifest = inspect(save(tmp_path / "made.pt", {"w": ThroughCpu(), "cpu": torch.ones(1)}, "cpu"))
    first, _ = manifest.tensors
    assert (first.name, first.device, first.shape, first.dtype) == ("w", "xla:0", (2,), "float32")
    assert manifest.storages["data/0"].location == "cpu"
    assert manifest.values_naming_devices == ()


def test_a_wrapper_without_a_known_class_is_listed_by_its_name(made: Made) -> None:
    _, manifest = made("wrapper_subclass")
    pair, first, second, plain = manifest.tensors
    assert pair.kind == "tests.making.subclasses.PairTensor"
    assert (pair.storage, pair.shape, pair.nbytes) == (None, (2, 3), 24)
    assert [part.part_of for part in (first, second, plain)] == ["pair", "pair", None]


def test_at_most_sixteen_names_are_told_of_one_storage(tmp_path: Path) -> None:
    base = torch.ones(100)
    manifest = inspect(save(tmp_path / "made.pt", [base[n : n + 1] for n in range(100)]))
    assert manifest.tensors[50].shared_with == tuple(str(n) for n in range(16))
    assert manifest.tensors[3].shared_with == tuple(str(n) for n in range(17) if n != 3)


# -- nothing runs, and nothing explodes ----------------------------------------------------------


class Canary:
    """Unpickled, it leaves a file behind in the working directory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch canary",)


QUIET = """
import sys, os
import ckptmove
from ckptmove.cli import run
sys.path.insert(0, os.getcwd())
before = set(sys.modules)
manifest = ckptmove.inspect("made.pt")
ckptmove.relocate("made.pt", "moved.pt", to="cuda:1")
assert "posix.system" in manifest.globals, manifest.globals
assert "canary.canary" in manifest.globals, manifest.globals
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not new & {"canary", "torch", "numpy", "posix", "tests"}, new
assert not {"torch", "numpy", "tests"} & set(sys.modules)
"""


def import_canary(data: bytes) -> bytes:
    """Name a module of its own in place of one of the same length."""
    return data.replace(b"cposix\nsystem\n", b"ccanary\ncanary\n0cposix\nsystem\n", 1)


def test_nothing_in_a_file_is_run_or_imported(tmp_path: Path) -> None:
    saved = {"bad": Canary(), "weight": torch.ones(2)}
    rezip(save(tmp_path / "plain.pt", saved), tmp_path / "made.pt", edit_pickle=import_canary)
    (tmp_path / "canary.py").write_text("open('canary', 'w')\ncanary = 1\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", QUIET], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "canary").exists()
    assert (tmp_path / "moved.pt").exists()
    with pytest.MonkeyPatch.context() as patch:  # it would have: the fixture can fail
        patch.chdir(tmp_path)
        patch.syspath_prepend(tmp_path)
        load(tmp_path / "moved.pt", weights_only=False)
        assert (tmp_path / "canary").exists()


def attributes_of_attributes() -> torch.Tensor:
    """Each tensor names the one before twice: 2^60 paths in 20 kB."""
    tensor = torch.ones(1)
    for _ in range(60):
        inner, tensor = tensor, torch.ones(1)
        vars(tensor).update(a=inner, b=inner)
    return tensor


def attribute_of_itself(data: bytes) -> bytes:
    """Put the tensor at memo 17 among its own attributes, which are at memo 14."""
    assert data.endswith(b"h\x11e.")
    return data.removesuffix(b"h\x11e.") + b"h\x0eX\x02\x00\x00\x00meh\x11s0h\x11e."


@pytest.mark.parametrize("bomb", ["paths", "cycle"])
def test_what_has_more_paths_than_bytes_is_listed_once(bomb: str, tmp_path: Path) -> None:
    path = tmp_path / "made.pt"
    if bomb == "paths":
        save(path, attributes_of_attributes(), "cpu")
    else:
        tensor = torch.ones(1)
        vars(tensor)["some"] = 1
        rezip(
            save(tmp_path / "plain.pt", [tensor] * 2, "cpu"), path, edit_pickle=attribute_of_itself
        )
    limited = ["bash", "-c", 'ulimit -v 500000; exec "$@"', "bash"]  # kB
    done = subprocess.run(
        [*limited, sys.executable, "-m", "ckptmove", "inspect", path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) < 200


class OnDevice:
    """A tensor as it comes from another device, by a callable that is not known."""

    def __reduce__(self) -> tuple[object, ...]:
        return torch.Tensor.to, (torch.ones(3), "cuda:0")


@pytest.mark.parametrize(
    "hidden",
    [OnDevice(), functools.partial(torch.zeros, 2, device="cuda:1")],
    ids=["to", "partial"],
)
def test_no_device_is_promised_of_what_unknown_callables_make(
    hidden: object, tmp_path: Path
) -> None:
    torch.save({"w": torch.ones(2), "hidden": hidden}, tmp_path / "run.pt")
    found = inspect(tmp_path / "run.pt")
    assert found.verdict == "uniform cpu; apart from what 1 unknown callable may make"
    with pytest.raises(CheckFailed, match="unknown callables"):
        found.require("cpu")
    torch.save({"w": torch.ones(2), "hidden": OnDevice}, tmp_path / "name.pt")
    inspect(tmp_path / "name.pt", require="cpu")  # which is not called with anything


def test_a_tensor_made_of_numpy_bytes_counts_for_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    WRAPPED_MAKERS["storageless_by_numpy"](path, "xla:0")
    weight = torch.load(path, map_location="cpu", weights_only=False)["weight"]
    devices = inspect(path).devices
    assert {name: each.nbytes for name, each in devices.items()} == {"xla:0": weight.nbytes}


class Outer:
    class Inner(torch.Tensor):
        """Its class is saved as a call of `getattr`."""


def test_a_tensor_of_a_class_within_another_is_not_called_corrupt(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3).as_subclass(Outer.Inner)}, tmp_path / "run.pt")
    with pytest.raises(UnsupportedError, match="a class within another class"):
        inspect(tmp_path / "run.pt")
