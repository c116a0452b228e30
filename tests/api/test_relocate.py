"""A relocated file is the source but for its tags, to every reader there is."""

from __future__ import annotations

import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptmove import Manifest, RefusedError, inspect, relocate
from tests.conftest import examples
from tests.making.checkpoints import (
    MAKERS,
    kept_on_cpu,
    rezip,
    save,
    save_by_cpp,
    save_tagged,
    sparse_zip64,
    squeeze,
)
from tests.making.strategies import TAGS, Checkpoint, checkpoint_trees
from tests.oracles.readers import (
    assert_locations,
    assert_same_checkpoint,
    assert_sound_zip,
    cpp_unpickler_accepts,
    inert_tree,
    load,
    loads_with_computed_offsets,
    pid_locations,
    storage_records,
)
from tests.oracles.sameness import assert_same_tree

# What spells a device itself: the argument of a wrapper, the type of a mesh; it is meant to change.
SPELLED = {
    "wrapper_subclass": {"pair.args.2.6"},
    "wrapper_subclass_on_cuda": {"pair.args.2.6"},
    "dtensor_state_dict": {
        *("weight.args.2.6", "bias.args.2.6"),
        "weight.args.3.1._spec.state.mesh.state._device_type",
        "weight.1._spec.mesh._device_type",
    },
}
MOVES = (
    *((2, "cpu", "cuda:1"), (2, "cuda:0", "cpu"), (2, "cuda:0", "privateuseone:15")),
    *((2, "cpu", "mps"), (2, "xpu:3", "meta"), (3, "cpu", "privateuseone:15")),
    *((4, "cpu", "privateuseone:15"), (5, "cuda:0", "mps")),
)


@pytest.mark.sample(75)
@pytest.mark.parametrize(("protocol", "tag", "to"), MOVES)
@pytest.mark.parametrize("name", MAKERS)
def test_all_but_the_tags_stays(
    name: str, protocol: int, tag: str, to: str, tmp_path: Path
) -> None:
    saved = MAKERS[name]()
    source, out, there = (tmp_path / f"{each}.pt" for each in ("made", "out", "there"))
    stays = kept_on_cpu(saved)
    save_tagged(saved, source, tag, stays, pickle_protocol=protocol)
    wanted = save_tagged(saved, there, to, stays, pickle_protocol=protocol)
    report = relocate(source, out, to=to)
    skip = SPELLED.get(name, ())
    assert_same_checkpoint(source, out, lambda key, _: wanted[key], trust=True, skip=skip)
    if protocol < 4:
        assert report.method == ("patch" if report.moved else "clone")
        assert out.stat().st_size == source.stat().st_size
    if to in ("cpu", "meta") and name != "recursive":  # which ends libtorch
        assert cpp_unpickler_accepts(out) == cpp_unpickler_accepts(there)


@pytest.mark.sample(4)
@pytest.mark.parametrize("to", ["cuda:0", "privateuseone:15", "cpu"])
@pytest.mark.parametrize("name", ["adamw_training", "cpu_string_last", "many_storages", "gan"])
def test_a_squeezed_pickle_is_laid_out_anew(name: str, to: str, tmp_path: Path) -> None:
    saved = MAKERS[name]()
    plain = save(tmp_path / "made.pt", saved, "mps", keep_cpu=kept_on_cpu(saved))
    source = squeeze(plain, tmp_path / "squeezed.pt")
    report = relocate(source, tmp_path / "out.pt", to=to)
    if report.method == "relay":
        assert_same_checkpoint(source, tmp_path / "out.pt", {"mps": to}, trust=True)
    else:
        assert to == "cpu"
    assert {tag for _, tag in pid_locations(tmp_path / "out.pt")} <= {to, "cpu"}


@pytest.mark.parametrize("compress", [None, lambda _: True], ids=["pickle", "everything"])
def test_a_deflated_pickle_is_stored_again(
    compress: Callable[[str], bool] | None, tmp_path: Path
) -> None:
    plain = save(tmp_path / "made.pt", MAKERS["adamw_weights_only"]())
    options: dict[str, Any] = {} if compress is None else {"compress": compress}
    source, out = rezip(plain, tmp_path / "deflated.pt", **options), tmp_path / "out.pt"
    report = relocate(source, out, to="cpu")
    assert report.method == "relay"
    assert ("compressed" in " ".join(report.warnings)) == (compress is not None)
    assert_same_checkpoint(source, out, {"cuda:0": "cpu"})
    with zipfile.ZipFile(out) as archive:
        methods = {info.filename.partition("/")[2]: info.compress_type for info in archive.filelist}
    assert methods["data.pkl"] == zipfile.ZIP_STORED
    assert methods["data/0"] == (zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED)


@contextmanager
def without_crcs() -> Iterator[None]:
    """torch.save writes 0 for every CRC."""
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)


@pytest.mark.parametrize(
    ("protocol", "to", "method"), [(2, "cpu", "patch"), (4, "privateuseone:15", "relay")]
)
def test_checksums_that_were_not_computed_stay_absent(
    protocol: int, to: str, method: str, tmp_path: Path
) -> None:
    source, out = tmp_path / "made.pt", tmp_path / "out.pt"
    with without_crcs():
        save(source, MAKERS["adamw_weights_only"](), "xpu:0", pickle_protocol=protocol)
    report = relocate(source, out, to=to, all=True)
    assert report.method == method
    assert "carry no checksum" in report.warnings[0]
    assert {info.CRC for info in storage_records(out)} == {0}
    assert_same_checkpoint(source, out, {"xpu:0": to}, trust=True)


def test_a_patched_pickle_has_its_checksum_wherever_the_zip_repeats_it(tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    relocate(save(tmp_path / "made.pt", MAKERS["gan"]()), out, to="cpu")
    assert_sound_zip(out)
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None


@pytest.mark.slow  # 5 GiB are checked
@pytest.mark.parametrize(
    ("protocol", "to", "method"),
    [(2, "cpu", "patch"), (4, "privateuseone:15", "relay")],
)
def test_a_giant_with_zip64(protocol: int, to: str, method: str, tmp_path: Path) -> None:
    source = sparse_zip64(tmp_path / "made.pt", 5, pickle_protocol=protocol)
    out, rules, safe = tmp_path / "out.pt", {"cuda:1": to}, protocol < 4
    assert relocate(source, out, map=rules).method == method
    assert_sound_zip(out, source)
    assert_locations(source, out, rules)
    assert_same_tree(inert_tree(source), inert_tree(out))
    assert out.stat().st_blocks * 512 < 1 << 24, "holes stay holes"
    plain = load(out, weights_only=safe, mmap=True)
    for mapped in (plain, loads_with_computed_offsets(out, weights_only=safe)):
        assert isinstance(mapped, dict)
        assert len(mapped["big"]) == 5 << 30
        for key, name in enumerate(("before", "big", "after")):
            raw = mapped[name].view(torch.uint8)
            mark = f"data/{key}".encode().ljust(16, b"~")
            assert bytes(raw[:16].tolist()) == bytes(raw[-16:].tolist()) == mark


@pytest.mark.parametrize("to", ["cuda:1", "mps", "privateuseone:15", "meta"])
def test_files_of_libtorch(to: str, tmp_path: Path) -> None:
    """Storages first; strings memoised by value, a `torch.device`'s included."""
    saved = (torch.ones(3), "cpu", torch.device("cpu"), torch.ones(2), ["cpu", "mps"])
    source, out = save_by_cpp(saved, tmp_path / "made.pt"), tmp_path / "out.pt"
    relocate(source, out, to=to)
    assert_same_checkpoint(source, out, {"cpu": to})
    assert cpp_unpickler_accepts(out) == (to == "meta")


# -- laws --------------------------------------------------------------------------------------

random_tags = st.sampled_from((*TAGS, "meta", "cuda:12", "privateuseone:7"))
within = settings(
    max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@within
@given(made=checkpoint_trees(), to=random_tags)
def test_twice_is_once_and_again_is_the_same(made: Checkpoint, to: str, tmp_path: Path) -> None:
    source, once, twice, again = (tmp_path / f"{n}.pt" for n in ("made", "once", "twice", "again"))
    save_tagged(made.tree, source, made.tag)
    relocate(source, once, to=to, force=True)
    relocate(once, twice, to=to, force=True)
    relocate(source, again, to=to, force=True)
    assert once.read_bytes() == twice.read_bytes() == again.read_bytes()


@within
@given(made=checkpoint_trees(), pair=st.tuples(st.sampled_from(TAGS), random_tags))
def test_there_and_back_is_the_same_manifest(
    made: Checkpoint, pair: tuple[str, str], tmp_path: Path
) -> None:
    source, there, back = (tmp_path / f"{name}.pt" for name in ("made", "there", "back"))
    save_tagged(made.tree, source, made.tag)
    swap = {pair[0]: pair[1], pair[1]: pair[0]}
    relocate(source, there, map=swap, force=True, allow_unmatched=True)
    relocate(there, back, map=swap, force=True, allow_unmatched=True)
    assert told(inspect(back)) == told(inspect(source))


def told(manifest: Manifest) -> Any:
    """All that a manifest says, but for what is the file's own."""
    return replace(manifest, path="", nbytes=0).to_json()


@within
@given(
    made=checkpoint_trees(),
    rules=st.dictionaries(st.sampled_from(TAGS), random_tags, max_size=4),
    to=st.none() | random_tags,
)
def test_any_rules_on_any_tree(
    made: Checkpoint, rules: dict[str, str], to: str | None, tmp_path: Path
) -> None:
    source, out = tmp_path / "made.pt", tmp_path / "out.pt"
    save_tagged(made.tree, source, made.tag)
    if to is None:
        rules = rules or {"cpu": "mps"}
    relocate(source, out, map=rules, to=to, force=True, allow_unmatched=True)
    assert_same_checkpoint(source, out, lambda _, old: rules.get(old, to or old))


@within
@given(made=checkpoint_trees(), data=st.data())
def test_any_places_on_any_tree(made: Checkpoint, data: st.DataObject, tmp_path: Path) -> None:
    source, out = tmp_path / "made.pt", tmp_path / "out.pt"
    save_tagged(made.tree, source, made.tag)
    names: dict[str, set[str]] = defaultdict(set)
    for entry in inspect(source).tensors:
        names[str(entry.storage)].add(entry.name)
    every = sorted(set().union(*names.values()))
    place = data.draw(st.dictionaries(st.sampled_from([*every, "*"]), random_tags, min_size=1))

    def wanted(name: str, old: str) -> str:
        """The last rule that speaks."""
        return next((place[each] for each in reversed(place) if each in (name, "*")), old)

    tags = dict(pid_locations(source))
    goals = {key: {wanted(name, tags[key[5:]]) for name in names[key]} for key in names}
    globs = {each if each == "*" else escape(each): tag for each, tag in place.items()}
    if any(len(goal) > 1 for goal in goals.values()):
        with pytest.raises(RefusedError, match="share a storage"):
            relocate(source, out, place=globs, force=True, allow_unmatched=True)
    else:
        relocate(source, out, place=globs, force=True, allow_unmatched=True)
        assert_same_checkpoint(source, out, lambda key, _: goals[f"data/{key}"].copy().pop())


def test_an_old_file_is_not_taken_for_one_that_was_not_written(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "run.pt")
    assert relocate(tmp_path / "run.pt", to="cpu").destination is None
    (tmp_path / "run.cpu.pt").write_bytes(b"old")
    for force in (False, True):
        with pytest.raises(RefusedError, match="nothing would move"):
            relocate(tmp_path / "run.pt", to="cpu", force=force)
    assert (tmp_path / "run.cpu.pt").read_bytes() == b"old"
