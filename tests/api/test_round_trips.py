"""From torch's formats to safetensors and back: nothing is lost, and nothing is unpickled."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors import safe_open

from ckptmove import Manifest, RefusedError, UnsupportedError, convert, inspect
from tests.conftest import corpus_files, examples
from tests.making.checkpoints import MAKERS, kept_on_cpu, save, save_tagged
from tests.making.families import FAMILIES
from tests.making.strategies import Checkpoint, checkpoint_trees
from tests.making.subclasses import one_process_group
from tests.oracles.families import read
from tests.oracles.readers import assert_sound_zip, load, loads_with_computed_offsets
from tests.oracles.sameness import assert_same_tree, assert_shows_the_same
from tests.oracles.showing import elements, told


class Trip(NamedTuple):
    """A file, what was made of it, and what was made of that."""

    source: Path
    there: Path
    back: Path

    @property
    def manifests(self) -> list[Manifest]:
        return [inspect(path) for path in self]


def go(source: Path, folder: Path) -> Trip:
    """There and back, and once more: the second time changes no byte."""
    trip = Trip(source, folder / "there.safetensors", folder / "back.pt")
    convert(source, trip.there, force=True)
    convert(trip.there, trip.back, force=True, trust_objects=True)
    again = Trip(trip.back, folder / "again" / "there.safetensors", folder / "again" / "back.pt")
    again.there.parent.mkdir(exist_ok=True)
    convert(again.source, again.there, force=True)
    convert(again.there, again.back, force=True, trust_objects=True)
    assert again.there.read_bytes() == trip.there.read_bytes()
    assert again.back.read_bytes() == trip.back.read_bytes()
    return trip


def assert_sound(trip: Trip) -> None:
    """Both files are what the libraries that read them expect."""
    with safe_open(trip.there, "pt") as file:
        names = list(file.keys())
        for name in names:
            assert file.get_tensor(name).is_contiguous()
        assert file.metadata()["format"] == "pt"
    assert_sound_zip(trip.back)


def assert_same_elements(trip: Trip, *, swapped: bool = False) -> None:
    """Every tensor that lies in the files has the same elements in all of them."""
    source, there, back = trip.manifests
    shown = [elements(trip.source, source, swapped=swapped)]
    shown += [elements(trip.there, there), elements(trip.back, back)]
    for names in shown[1:]:
        for name in shown[0].keys() & names.keys():
            assert names[name] == shown[0][name], name


# -- anything that torch.save saves ------------------------------------------------------------

#: Tensors whose keys are spelled by protocol: bytes are a call in protocol 2.
SPELLED_BY_PROTOCOL = {"non_string_keys", "saved_non_string_keys"}


@pytest.mark.sample(30)
@pytest.mark.parametrize("name", MAKERS)
def test_torch_loads_the_same(name: str, tmp_path: Path) -> None:
    saved = MAKERS[name]()
    source = tmp_path / "made.pt"
    save(source, saved, keep_cpu=kept_on_cpu(saved))
    trip = go(source, tmp_path)
    with one_process_group():
        ours, theirs = (load(path, weights_only=False) for path in (trip.source, trip.back))
        assert_shows_the_same(ours, theirs)
        assert_same_tree(theirs, loads_with_computed_offsets(trip.back, weights_only=False))
    before, there, back = map(told, trip.manifests)
    if name in SPELLED_BY_PROTOCOL:
        before, there, back = ([each[1:] for each in every] for every in (before, there, back))
    assert before == there == back


within = settings(
    max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@within
@given(made=checkpoint_trees())
def test_any_tree_comes_back(made: Checkpoint, tmp_path: Path) -> None:
    source = tmp_path / "made.pt"
    save_tagged(made.tree, source, made.tag)
    try:
        trip = go(source, tmp_path)
    except UnsupportedError as error:
        if "a single pair of float4" not in str(error):  # which safetensors can't hold
            raise
        return
    assert_shows_the_same(load(source, weights_only=True), load(trip.back, weights_only=True))
    before, there, back = map(told, trip.manifests)
    assert before == there == back
    assert_sound(trip)


# -- files of every family ---------------------------------------------------------------------

FILES = [
    (family, name)
    for family, makers in FAMILIES.items()
    for name in makers
    if not name.startswith("saved_dtype_")  # `saved_every_dtype` has them all
]
#: What is beside the tensors, which no other format has room for.
PROGRAMS = {"script": "its code", "exported": "its program", "packaged": "its modules"}
#: Checkpoints in bytes of others: they stay bytes, whose tensors safetensors don't name.
NESTED = {"estimator", "estimator_legacy", "nested_0", "nested_2", "nested_3", "nested_5"}
#: Whose readers give other types than were saved.
OF_OTHER_READERS = ("python2", "estimator", "nested")
#: Whose bits the file has lazily negated, which a manifest doesn't say; torch is asked instead.
LAZY = {"saved_conjugate_view", "saved_negative_view"}
#: Whose storages are parts of others, which torch makes storages of their own.
PARTS = {"view_metadata"}
#: A storage on its own is a number in a tar, as a tensor is: a dict of both is a state dict there.
OTHERWISE = {"bare_storages"}


@pytest.mark.sample(40)
@pytest.mark.parametrize(("family", "name"), [file for file in FILES if file[0] not in PROGRAMS])
def test_every_file_comes_back(family: str, name: str, tmp_path: Path) -> None:
    source = tmp_path / "made"
    expected = FAMILIES[family][name](source, "cuda:1")
    trip = go(source, tmp_path)
    before, there, back = map(told, trip.manifests)
    if name in SPELLED_BY_PROTOCOL | OTHERWISE:
        before, there, back = ([each[1:4] for each in every] for every in (before, there, back))
    assert before == back
    assert before == there or name in NESTED
    if name not in LAZY:
        assert_same_elements(trip)
    assert_sound(trip)
    if family in ("legacy", "pickled") and not name.startswith(OF_OTHER_READERS):
        theirs = read("legacy", "", trip.back).tree
        if expected.readable and name not in PARTS:
            assert_shows_the_same(read(family, name, source).tree, theirs)


@pytest.mark.sample(5)
@pytest.mark.parametrize(("family", "name"), [file for file in FILES if file[0] in PROGRAMS])
def test_programs_are_refused_and_their_tensors_taken(
    family: str, name: str, tmp_path: Path
) -> None:
    source, there, back = (tmp_path / each for each in ("made.pt2", "there.safetensors", "back.pt"))
    FAMILIES[family][name](source, "cuda:1")
    with pytest.raises(
        RefusedError, match=rf"would lose <{PROGRAMS[family]}>, which cannot be stored"
    ):
        convert(source, there)
    assert not there.exists()
    report = convert(source, there, drop=(f"<{PROGRAMS[family]}>", "<record *>"))
    files = [each.name for each in inspect(source).records if each.kind == "data"]
    losses = [f"<{PROGRAMS[family]}>", *(f"<record {each}>" for each in files)]
    assert [loss.name for loss in report.dropped] == losses
    shown = elements(there, inspect(there))
    if (family, name) == ("packaged", "script"):  # a number of a program among the modules
        with pytest.raises(
            UnsupportedError, match="refers to something outside the file that is not"
        ):
            convert(there, back)
        return
    convert(there, back, trust_objects=True)
    assert shown == elements(back, inspect(back))
    if family == "script":
        wanted = _of_script(source)
        assert wanted.items() <= shown.items() or name.startswith("lite")


def _of_script(path: Path) -> dict[str, bytes]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.jit.load(path, map_location="cpu")
    return {
        name: bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        for name, tensor in module.state_dict().items()
    }


# -- files of the public -----------------------------------------------------------------------

KINDS = ("zip", "legacy", "pickle", "tar-legacy", "zip-container", "safetensors")
SCRIPTS = ("torchscript", "torchscript-lite", "torchscript-v1(json)")
CORPUS = [each for kind in KINDS for each in corpus_files(kind)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("path", CORPUS)
def test_a_public_file_comes_back(path: Path, tmp_path: Path) -> None:
    try:
        before = inspect(path)
    except UnsupportedError:
        pytest.skip("it can't be read")
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            has_metadata = (file.metadata() or {}).keys() - {"format"}
        if has_metadata:  # which goes on with the tensors
            convert(path, tmp_path / "plain.pt")
            convert(tmp_path / "plain.pt", tmp_path / "again.safetensors", bare=True)
            with safe_open(tmp_path / "again.safetensors", "pt") as file:
                assert (file.metadata() or {}).keys() - {"format"} == has_metadata
            path = tmp_path / "plain.pt"
    if before.format == "zip-bundle":  # whose short files are bytes of the tree from then on
        convert(path, tmp_path / "plain.pt")
        path = tmp_path / "plain.pt"
    trip = go(path, tmp_path)
    assert told(before) == told(inspect(trip.back))
    nested = path.name.endswith("net_cuda.pkl")
    assert told(before) == told(inspect(trip.there)) or nested
    assert_same_elements(trip, swapped=path.name.endswith("data_be_bom.pt"))
    assert_sound(trip)


def test_a_refusal_names_every_option_that_accepts_the_losses(tmp_path: Path) -> None:
    script = torch.jit.script(torch.nn.Linear(2, 2))
    torch.jit.save(script, path := tmp_path / "in.pt", _extra_files={"note": "x"})
    with pytest.raises(RefusedError) as refused:
        convert(path, tmp_path / "out.safetensors")
    assert refused.value.hint == "--drop '<its code>' --drop '<record extra/note>' accept that"
    drop = re.findall(r"--drop '([^']+)'", refused.value.hint)
    assert {loss.name for loss in convert(path, tmp_path / "out.pt", drop=drop).dropped} == {*drop}


@pytest.mark.sample(3)
@pytest.mark.parametrize("path", [each for kind in SCRIPTS for each in corpus_files(kind)])
def test_a_public_program_is_refused_and_its_tensors_taken(path: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there.safetensors", tmp_path / "back.pt"
    with pytest.raises(RefusedError, match="would lose <its code>"):
        convert(path, there)
    convert(path, there, drop=("<its code>", "<record *>"))
    convert(there, back)
    shown = elements(there, inspect(there))
    assert shown == elements(back, inspect(back))
    of_source = elements(path, inspect(path))
    names = {entry.state_key or entry.name: entry.name for entry in inspect(path).tensors}
    assert shown == {key: of_source[names[key]] for key in shown if names.get(key) in of_source}
