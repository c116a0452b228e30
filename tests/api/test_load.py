"""load(): what torch.load gives, of any format, mapped, and without running anything."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import random
import resource
import subprocess
import sys
import warnings
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckptmove
from ckptmove import CkptmoveError, DeviceError, InputError, UntrustedError, UsageError
from tests.making.building import at_most
from tests.making.checkpoints import MAKERS, rezip, save, sparse_zip64
from tests.making.expected import having_every_device
from tests.making.families import FAMILIES
from tests.making.mutating import mutated
from tests.making.relaying import big_endian
from tests.oracles.families import read
from tests.oracles.readers import load, loads_safely
from tests.oracles.sameness import assert_same_tree
from tests.runtime.test_build import REGISTERED, holds_opaque
from tests.whole.test_memory import PROJECT

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

# -- the same as torch.load ------------------------------------------------------------------------


def comparable(theirs: Any, ours: Any) -> tuple[Any, Any]:
    """Both trees, without what is opaque in ours."""
    if not holds_opaque(ours):
        return theirs, ours
    if isinstance(ours, dict):
        pairs = list(zip(theirs.items(), ours.items(), strict=True))
        both = [comparable(value, mine) for (_, value), (_, mine) in pairs]
        return [each[0] for each in both], [each[1] for each in both]
    if isinstance(ours, (list, tuple)):
        both = [comparable(*pair) for pair in zip(theirs, ours, strict=True)]
        return [each[0] for each in both], [each[1] for each in both]
    return None, None


def assert_same(theirs: object, ours: object) -> None:
    """The same trees, but for what is opaque in ours."""
    assert_same_tree(*comparable(theirs, ours))


def assert_loads_alike(path: Path, name: str) -> None:
    safe = loads_safely(path)
    made = ckptmove.load(path, strict=safe and name not in REGISTERED)
    assert_same(load(path, weights_only=safe, map_location=None), made)


@pytest.mark.sample(70)
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_zip(name: str, tmp_path: Path) -> None:
    assert_loads_alike(save(tmp_path / "saved.pt", MAKERS[name](), "cpu"), name)


@pytest.mark.sample(28)
# Convert has a bug with the first: storages with elements of several dtypes.
@pytest.mark.parametrize("name", sorted(MAKERS.keys() - {"same_storage_as_three_dtypes"}))
def test_safetensors_with_a_tree(name: str, tmp_path: Path) -> None:
    path, back = tmp_path / "saved.safetensors", tmp_path / "back.pt"
    ckptmove.convert(save(tmp_path / "saved.pt", MAKERS[name](), "cpu"), path)
    ckptmove.convert(path, back, trust_objects=True)
    safe = loads_safely(back)
    assert_same(load(back, weights_only=safe), ckptmove.load(path))


def test_safetensors_by_the_library(tmp_path: Path) -> None:
    path = tmp_path / "saved.safetensors"
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)
    saved = {str(kind): torch.ones(2, 3).to(kind) for kind in kinds}
    saved |= {"0-d": torch.tensor(-0.0), "empty": torch.empty(0, 4), "nan": torch.tensor([1e999])}
    safetensors.torch.save_file(saved, path, {"format": "pt"})
    ours, theirs = ckptmove.load(path, strict=True), safetensors.torch.load_file(path)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape)
        each = [one.flatten().view(torch.uint8) for one in (ours[name], tensor)]
        assert each[0].equal(each[1])


PICKLED = [
    (family, name)
    for family in ("legacy", "pickled", "wrapped")
    for name in FAMILIES[family]
    if not name.startswith(("nested", "python2"))  # bytes stay bytes, and there strings too
    and name not in ("view_metadata", "saved_generator")
]


@pytest.mark.sample(60)
@pytest.mark.parametrize(("family", "name"), PICKLED)
def test_a_file_of_the_families(family: str, name: str, tmp_path: Path) -> None:
    path, tag = tmp_path / "saved", "cuda:1"
    expected = FAMILIES[family][name](path, tag)
    away = name == "storageless"
    with having_every_device() as restored:
        made = ckptmove.load(path, "cpu" if away else None)
    if away:
        assert_same(torch.load(path, "cpu", weights_only=False), made)
    elif expected.readable:
        tree = read(family, name, path).tree
        if tree is not None:
            assert_same(tree, made)
        assert set(restored.tags.values()) <= {"cpu", tag, "meta", "cuda:0"}


def test_parts_of_storages_share_them(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    FAMILIES["legacy"]["view_metadata"](path, "cpu")
    ours, theirs = ckptmove.load(path, strict=True), torch.load(path, weights_only=False)
    for name, tensor in theirs.items():
        if isinstance(tensor, torch.Tensor):
            assert ours[name].equal(tensor)
            assert ours[name].stride() == tensor.stride()


# torch takes parts of storages for storages of their own.
@pytest.mark.parametrize("name", sorted(FAMILIES["tar"].keys() - {"storage_views"}))
def test_a_tar(name: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    FAMILIES["tar"][name](path, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = torch.load(path, "cpu", weights_only=False)
    assert_same(theirs, ckptmove.load(path, "cpu"))


@pytest.mark.parametrize("name", FAMILIES["script"])
def test_a_script_is_a_dict_of_its_tensors(name: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    expected = FAMILIES["script"][name](path, "cpu")
    made = ckptmove.load(path, strict=True)
    if not expected.readable:
        return
    theirs: Any = torch.jit.load(path, map_location="cpu")
    named = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    for at, tensor in named.items():
        if tensor.layout is torch.strided and not tensor.is_quantized and at in made:
            assert made[at].equal(tensor), at
    assert all(isinstance(each, torch.Tensor) for each in made.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["model", "plain_zip", "pickled_weights"])
def test_a_program_is_a_dict_of_its_tensors(name: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.pt2"
    FAMILIES["exported"][name](path, "cpu")
    theirs: Any = torch.export.load(path)
    made = ckptmove.load(path, strict=True)
    for at, tensor in theirs.state_dict.items():
        assert made[at].equal(tensor)


@pytest.mark.parametrize("name", FAMILIES["packaged"])
def test_a_package_is_a_dict_of_its_pickles(name: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    expected = FAMILIES["packaged"][name](path, "cpu")
    made = ckptmove.load(path)
    found = {
        each.untyped_storage().nbytes()
        for each in torch.utils._pytree.tree_leaves(made)
        if isinstance(each, torch.Tensor)
    }
    assert isinstance(made, dict)
    assert name in ("module", "script") or found == {len(e) for e in expected.storages.values()}


def test_a_bundle_is_a_dict_of_its_checkpoints(tmp_path: Path) -> None:
    save(tmp_path / "policy.pth", {"a": torch.arange(3.0)}, "cpu")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("data", "{}")
        archive.write(tmp_path / "policy.pth", "policy.pth")
    made = ckptmove.load(tmp_path / "all.zip")
    assert made["policy.pth"]["a"].tolist() == [0, 1, 2]


def test_what_is_big_endian_or_compressed(tmp_path: Path) -> None:
    saved = {"f": torch.arange(4.0), "c": torch.ones(2, dtype=torch.complex64), "b": b"x"}
    path = save(tmp_path / "saved.pt", saved, "cpu")
    packed = rezip(path, tmp_path / "packed.pt", lambda _: True)
    assert_same_tree(load(path, weights_only=True), ckptmove.load(packed, strict=True))

    big = big_endian(path, tmp_path / "big.pt", defaultdict(lambda: 4))
    assert_same_tree(load(path, weights_only=True), ckptmove.load(big, strict=True))


# -- nothing is run --------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm")
def test_nothing_is_imported(tmp_path: Path) -> None:
    (tmp_path / "canary.py").write_text("raise SystemExit('imported')\nclass C: pass\n")
    path = tmp_path / "saved.pkl"
    path.write_bytes(b"\x80\x02ccanary\nC\n)\x81}X\x01\x00\x00\x00aK\x01sb.")
    code = f"import ckptmove; print(ckptmove.load({str(path)!r}))"
    env = {**os.environ, "PYTHONPATH": f"{PROJECT}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == "<Opaque canary.C() a>\n", done.stderr
    with pytest.raises(UntrustedError, match=r"names unknown callables: canary\.C"):
        ckptmove.load(path, strict=True)


# -- map_location ----------------------------------------------------------------------------------

MAPS: dict[str, Any] = {
    "none": None,
    "text": "cpu",
    "device": torch.device("cpu"),
    "meta": "meta",
    "meta device": torch.device("meta"),
    "dict": {"cuda:0": "cpu"},
    "function": lambda storage, location: storage,
    "function that leaves it": lambda storage, location: None,
    "function of one": lambda storage, location: storage if location == "cuda:0" else None,
}


@pytest.mark.parametrize("tag", ["cpu", "cuda:0", "cuda:1", "mps"])
@pytest.mark.parametrize("how", MAPS)
def test_map_location(how: str, tag: str, tmp_path: Path) -> None:
    saved = {"a": torch.arange(3.0), "n": 1, "v": torch.ones(4, dtype=torch.uint16)[1:]}
    path = save(tmp_path / "saved.pt", saved, tag)
    try:
        theirs = load(path, weights_only=True, map_location=MAPS[how])
    except RuntimeError:
        with pytest.raises(DeviceError, match="no tensor can be put on '") as caught:
            ckptmove.load(path, MAPS[how])
        assert str(caught.value).endswith('; map_location="cpu" loads it on the CPU')
        assert not isinstance(caught.value, ckptmove.InputError)  # nothing is wrong with the file
        assert "\n" not in str(caught.value)
    else:
        assert_same_tree(theirs, ckptmove.load(path, MAPS[how]))


def test_map_location_sees_what_torch_shows_it(tmp_path: Path) -> None:
    path = save(tmp_path / "saved.pt", MAKERS["adam_mixed_capturable"](), "cuda:1")
    seen: list[list[object]] = []
    for by in (torch.load, ckptmove.load):
        met: list[object] = []

        def note(storage: Any, location: str, met: list[object] = met) -> Any:
            met.append((type(storage), storage.nbytes(), location, type(location)))
            return storage

        by(path, map_location=note)
        seen.append(met)
    assert seen[0] == seen[1]


def test_the_default_device_is_not_that_of_tensors(tmp_path: Path) -> None:
    row = torch.arange(4.0)
    path = save(tmp_path / "saved.pt", {"row": row, "part": row[1:]}, "cpu")
    with torch.device("meta"):
        theirs, ours = torch.load(path), ckptmove.load(path)
    assert_same_tree(theirs, ours)
    assert ours["part"].tolist() == [1, 2, 3]


def test_sparse_tensors_without_data_are_not_checked(tmp_path: Path) -> None:
    path = save(tmp_path / "saved.pt", {"coo": torch.eye(3).to_sparse(), "x": torch.ones(2)}, "cpu")
    loaded = ckptmove.load(path, map_location="meta")
    assert loaded["coo"].is_meta
    assert loaded["coo"].layout is torch.sparse_coo
    assert loaded["coo"].shape == (3, 3)


def test_map_location_raises_what_it_raises(tmp_path: Path) -> None:
    path = save(tmp_path / "saved.pt", [torch.ones(1)], "cpu")
    before = torch.serialization._serialization_tls.map_location

    def fail(storage: object, location: str) -> object:
        raise KeyError(location)

    with pytest.raises(KeyError, match="cpu"):
        ckptmove.load(path, fail)
    with pytest.raises(UsageError, match="map_location gave a int, not a storage"):
        ckptmove.load(path, lambda storage, location: 3)
    with pytest.raises(UsageError, match="map_location can't be 3"):
        ckptmove.load(path, 3)
    assert torch.serialization._serialization_tls.map_location is before


@pytest.mark.parametrize("to", ["cpu", "meta", {"cuda:1": "cpu"}])
def test_tensors_that_name_their_device(to: Any, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    FAMILIES["wrapped"]["storageless"](path, "cuda:1")
    theirs = torch.load(path, to, weights_only=False)
    assert_same_tree(theirs, ckptmove.load(path, to, strict=True))
    for other in (None, lambda storage, location: storage):
        with pytest.raises(DeviceError, match=r"its device.*map_location=\"cpu\""):
            ckptmove.load(path, other)


# -- memory, and the file --------------------------------------------------------------------------

_GROWTH = """
import sys, torch, ckptmove
def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(l.split()[1]) for l in lines if l.startswith("RssAnon"))
ckptmove.load(sys.argv[1])
before = anonymous()
tree = ckptmove.load(sys.argv[2], "cpu")
largest = max(tree.values(), key=lambda tensor: tensor.nbytes)
assert largest.view(torch.uint8)[::4096].sum() >= 0
print(anonymous() - before)
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is told by Linux only")
@pytest.mark.parametrize("kind", ["zip", "safetensors"])
def test_tensors_are_mapped(kind: str, tmp_path: Path) -> None:
    small, large = save(tmp_path / "small.pt", [torch.ones(1)], "cpu"), tmp_path / f"large.{kind}"
    if kind == "zip":
        sparse_zip64(large, 0.5)
    else:
        header = b'{"a":{"dtype":"F32","shape":[134217728],"data_offsets":[0,536870912]}}  '
        large.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(large, large.stat().st_size + (512 << 20))
    command = [sys.executable, "-c", _GROWTH, str(small), str(large)]
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert int(done.stdout) < 20_000_000


@pytest.mark.parametrize("format", ["zip", "legacy", "safetensors"])
def test_writing_to_tensors_never_changes_the_file(format: str, tmp_path: Path) -> None:
    path = tmp_path / f"saved.{format}"
    tensors = {"a": torch.arange(8.0), "b": torch.zeros(4, dtype=torch.uint8)}
    if format == "safetensors":
        safetensors.torch.save_file(tensors, path)
    else:
        save(path, tensors, "cpu", _use_new_zipfile_serialization=format == "zip")
    before = path.read_bytes()
    made = ckptmove.load(path)
    for tensor in made.values():
        tensor += 1
    assert path.read_bytes() == before
    assert made["a"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    path.unlink()  # which tensors outlive
    assert ckptmove.__version__
    assert made["b"].tolist() == [1, 1, 1, 1]


def test_paths_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.pt")
    save(tmp_path / "a.pt", {"a": torch.ones(3)}, "cpu").rename(path)
    assert ckptmove.load(path)["a"].tolist() == [1, 1, 1]


# -- a part of it ----------------------------------------------------------------------------------


def test_select(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    adam.step()
    saved = {"model": net.state_dict(), "optimizer": adam.state_dict(), "epoch": 3}
    path = save(tmp_path / "saved.pt", saved, "cpu")
    model = ckptmove.load(path, select="model")
    assert list(model) == ["model"]
    assert_same_tree(load(path, weights_only=True)["model"], model["model"])  # type: ignore[index]
    assert list(ckptmove.load(path, select=["model.w*"])["model"]) == ["weight"]
    with pytest.raises(CkptmoveError):
        ckptmove.load(path, select="nothing.*")


# -- hostile files ---------------------------------------------------------------------------------


def test_a_pickle_of_plain_data(tmp_path: Path) -> None:
    saved = {"lr": 0.1, "args": argparse.Namespace(a=[1, (2,)]), "none": None}
    path = tmp_path / "saved.pkl"
    path.write_bytes(pickle.dumps(saved, 4))
    assert_same_tree(saved, ckptmove.load(path, strict=True))


def error_of(path: Path) -> CkptmoveError | None:
    """What loading is refused with."""
    try:
        ckptmove.load(path, "cpu")
    except InputError as error:
        return error
    return None


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
def test_damaged_files_are_refused_or_loaded(seed: int, tmp_path: Path) -> None:
    """Nothing but our errors, no hang, no memory that the file has not got."""
    dice, path = random.Random(seed), tmp_path / "damaged"
    names = ("adam_mixed_capturable", "tied_weights", "sparse_coo_hybrid", "quantized_quint8")
    donors = []
    for name in names:
        zipped = save(tmp_path / "in.pt", MAKERS[name](), "cpu")
        donors.append(zipped.read_bytes())
        ckptmove.convert(zipped, tmp_path / "in.safetensors", force=True)
        donors.append((tmp_path / "in.safetensors").read_bytes())
        save(zipped, MAKERS[name](), "cpu", _use_new_zipfile_serialization=False)
        donors.append(zipped.read_bytes())
    before, loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for _ in range(250):
        path.write_bytes(mutated(dice.choice(donors), donors, dice))
        with at_most(30), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded += error_of(path) is None
    assert 0 < loaded < 250
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KiB


TERMS = [
    {"$": "call", "of": "os:system", "args": ["touch here"]},
    {"$": "call", "of": "torch._utils:_rebuild_tensor_v2", "args": [{"$": "storage", "of": "a"}]},
    {"$": "tensor", "of": "a", "shape": [1 << 40], "stride": [0]},
    {"$": "tensor", "of": "a", "shape": [1 << 62, 1 << 62], "stride": [0, 0]},
    {"$": "tensor", "of": "a", "shape": [9], "offset": 1},
    {"$": "tensor", "of": "a", "device": "cuda:99"},
    {"$": "tensor", "of": "a", "conj": True},
    {"$": "again", "as": 0},
    {"$": "shared", "as": 0, "of": {"$": "tuple", "of": [{"$": "again", "as": 0}]}},
    {"$": "call", "of": "builtins:bytearray", "args": [1 << 60]},
    {"$": "call", "of": "collections:deque", "args": [[], -1]},
    {"$": "call", "of": "torch:Size", "args": [[1 << 70]]},
    {"$": "set", "of": [[]]},
    {"$": "dict", "of": [[{"$": "tensor", "of": "a"}, 1]]},
]


@pytest.mark.parametrize("term", TERMS, ids=range(len(TERMS)))
def test_hostile_terms(term: object, tmp_path: Path) -> None:
    path = tmp_path / "saved.safetensors"
    said = json.dumps({"version": 1, "root": [term, {"$": "tensor", "of": "a"}]})
    safetensors.torch.save_file({"a": torch.ones(9)}, path, {"ckptmove": said})
    with at_most(10), contextlib.suppress(CkptmoveError):
        ckptmove.load(path, strict=True)
    with at_most(10), contextlib.suppress(CkptmoveError):
        ckptmove.load(path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
