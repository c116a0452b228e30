"""Files of every family: what is in them, and that relocating changes devices and nothing else."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckptmove import Manifest, TensorEntry, inspect, relocate
from ckptmove.manifest.manifest import Role
from tests.conftest import in_turn
from tests.making.expected import Expected
from tests.making.families import FAMILIES
from tests.oracles.families import READERS, read
from tests.oracles.sameness import assert_same_tree

TAGS = ("cpu", "cuda:1", "mps")
MOVES = (("cpu", "cuda:3"), ("cuda:1", "cpu"), ("mps", "cuda:3"))

FILES = [
    (family, name) for family, makers in FAMILIES.items() if family in READERS for name in makers
]

# -- how the names of the makers are spelled by us -------------------------------------------------

_KEY = re.compile(r"Parameter containing:\ntensor\(.*?requires_grad=True\)", re.DOTALL)
SPELLED: dict[str, dict[str, str]] = {
    "saved_non_string_keys": {"torch.float32": "<key 9>"},
    "saved_python_objects": {
        "metric.1": "metric.<args>.1",
        "metrics.Phase.WARMUP.0.1": "metrics.<key 0>.0.<args>.1",
    },
    "objects": {
        "0.tensors.0": "0.<args>.0",
        "0.tensors.1": "0.<args>.1",
        "1.1": "1.<args>.1",
    },
}
# What the makers don't count as tensors: attributes of tensors, bare storages, a generator's state.
BESIDE: dict[str, set[str]] = {
    "saved_tensor_with_attributes": {"mask"},
    "saved_generator": {"generator.<state>.2"},
    "saved_typed_storage": {"storage"},
    "saved_untyped_storage": {"alone", "shared"},
    "sharded": {"weight.<state>.0.tensor"},
}
# Wrappers that say a device themselves, wherever what they hold is.
OWN: dict[str, dict[str, str]] = {
    "saved_wrapper_subclass": {"pair": "cpu"},
    "saved_wrapper_subclass_on_cuda": {"pair": "cuda:0"},
    "saved_dtensor_state_dict": {"weight": "cpu", "bias": "cpu"},
}
# Whose bytes are spelled as text, all or some of them.
TEXTUAL = re.compile(r"(protocol|squeezed|python|python2|large|nested)_[0-2]|nested_[35]")
# Names of a part of what the makers count as the storage.
VIEWS = {"left", "middle", "again", "inside", "nothing", "part"}
# Whose values are in no storage of their own under that name.
ELSEWHERE = {"sharded": {"weight"}, "storageless_by_numpy": {"weight"}}
# The devices that these name are those of tensors, or keys, or no more than a string in code.
UNCOUNTED = {"quantized", "sharded", "helped"}
# Whose maker leaves something on the CPU that torch has no reason to leave there.
MIXED = {"scripted_mixed": {"shift"}, "storageless": {"bias"}}

# What a module that was saved whole keeps its tensors in, and its state dict does not name.
_FRAME = re.compile(r"(?<![^.])_(modules|parameters|buffers)\.")


def spelled(name: str, family: str, tensor: str, keys: dict[str, str]) -> str:
    """The name that we give to a tensor of a maker's."""
    if name == "saved_non_string_keys" and family == "legacy" and tensor == "b'raw'":
        return "<key 8>"
    tensor = _FRAME.sub("", tensor)
    if name.startswith("estimator"):
        return f"__cuda_dependent_attributes__.{tensor}"
    found = _KEY.sub(lambda at: keys.setdefault(at[0], f"<key {len(keys)}>"), tensor)
    return SPELLED.get(name, {}).get(found, found)


class Made(NamedTuple):
    """A file, what its maker says of it, and what we say."""

    family: str
    name: str
    path: Path
    expected: Expected
    manifest: Manifest

    @property
    def ours(self) -> dict[str, TensorEntry]:
        """Each tensor by its name, under the names of what is met again too."""
        found = {each.name.replace("(root)", ""): each for each in self.manifest.tensors}
        for name, of in self.manifest.aliases:
            inside = [each for each in found if each.startswith(f"{of}.")]
            found.update((name + each.removeprefix(of), found[each]) for each in inside)
        return found

    def named(self) -> Iterator[tuple[str, str]]:
        """The maker's name of each tensor, and ours."""
        keys: dict[str, str] = {}
        for tensor in self.expected.devices:
            yield tensor, spelled(self.name, self.family, tensor, keys)


Make = Callable[[str, str, str], Made]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Family, name and tag → the file."""
    folder = tmp_path_factory.mktemp("families")

    @functools.cache
    def make(family: str, name: str, tag: str) -> Made:
        path = folder / f"{family}.{name}.{tag.replace(':', '-')}"
        expected = FAMILIES[family][name](path, tag)
        return Made(family, name, path, expected, inspect(path))

    return make


#: Files by tags and moves that take turns: not one in three, which would always go the same way.
by_turns = pytest.mark.sample(len(FILES) * 3 // 7)
#: Fewer, where each takes long.
by_few_turns = pytest.mark.sample(len(FILES) * 2 // 13)
every_file = pytest.mark.parametrize(("family", "name"), FILES)
every_tag = pytest.mark.parametrize("tag", TAGS)


# -- inspect ---------------------------------------------------------------------------------------


@by_turns
@every_tag
@every_file
def test_devices_are_those_of_the_maker(family: str, name: str, tag: str, made: Make) -> None:
    file = made(family, name, tag)
    ours, own = file.ours, OWN.get(name, {})
    wanted = {us: own.get(us, file.expected.devices[them]) for them, us in file.named()}
    assert {at: ours[at].device for at in wanted} == wanted
    listed = {entry.name.replace("(root)", "") for entry in file.manifest.tensors}
    for at in listed - wanted.keys():
        assert ours[at].part_of is not None or at in BESIDE.get(name, ()) or "<key>" in at, at
        host = ours[at].role in (Role.RANK_MAP, Role.SHAPE, Role.RNG_STATE)
        assert ours[at].device == ("cpu" if host else tag), at


@pytest.mark.sample(len(FILES) // 4)
@pytest.mark.parametrize(("family", "name", "tag"), in_turn(FILES, [(tag,) for tag in TAGS], 1))
def test_bytes_are_those_of_the_maker(family: str, name: str, tag: str, made: Make) -> None:
    file = made(family, name, tag)
    ours, data, names = file.ours, file.path.read_bytes(), dict(file.named())
    keys: dict[str, str] = {}
    for them, content in file.expected.storages.items():
        at = names.get(them) or spelled(name, family, them, keys).removeprefix(".")
        at = at.replace("tied.", "weight.") if name == "quantized" else at
        if them in ELSEWHERE.get(name, ()):
            assert ours[at].storage is None
            continue
        storage = file.manifest.storages[ours[at].storage or ""]
        if storage.extent is None:
            assert TEXTUAL.fullmatch(name), at
            assert storage.nbytes == len(content)
        else:
            found = data[storage.extent.start : storage.extent.end]
            assert found == content or (at in VIEWS and content in found), at


@by_turns
@every_tag
@every_file
def test_values_that_name_devices(family: str, name: str, tag: str, made: Make) -> None:
    file = made(family, name, tag)
    if file.expected.elsewhere is None or name in UNCOUNTED:
        return
    values = [value.value for value in file.manifest.values_naming_devices if not value.fixed]
    assert Counter(values) == Counter(file.expected.elsewhere)


# -- relocate --------------------------------------------------------------------------------------


@by_few_turns
@pytest.mark.parametrize(("family", "name", "tag", "to"), in_turn(FILES, MOVES, 2))
def test_all_goes_there_and_nothing_else_changes(
    family: str, name: str, tag: str, to: str, made: Make, tmp_path: Path
) -> None:
    file, out = made(family, name, tag), tmp_path / "out"
    report = relocate(file.path, out, to=to, all=True)
    before, after = file.manifest, inspect(out)
    # What is saved through the CPU says its device itself: the bytes stay there.
    through = {each.storage for each in before.tensors if each.says_device}
    moving = [each for each in before.storages.values() if each.id not in through]
    assert {key: n.storages for key, n in report.moved.items() if n.storages} == Counter(
        f"{each.location}→{to}" for each in moving if each.location != to
    )
    assert {each.location for key, each in after.storages.items() if key not in through} <= {to}
    assert contents(out, after) == contents(file.path, before)
    if not file.expected.readable:
        return
    was, found = read(family, name, file.path), read(family, name, out)
    assert set(found.devices) == set(was.devices)
    stays = {"meta"} if name == "saved_meta_tensor" else {"cpu"} if name == "storageless" else set()
    assert set(found.devices.values()) <= {to} | stays
    assert found.storages == was.storages
    assert_same_tree(was.tree, found.tree, skip=set(OWN.get(name, ())))


def contents(path: Path, manifest: Manifest) -> dict[str, bytes]:
    """The bytes of each storage, read from where it is said to be."""
    data = path.read_bytes()
    extents = {key: storage.extent for key, storage in manifest.storages.items()}
    return {key: data[each.start : each.end] for key, each in extents.items() if each}


@by_few_turns
@pytest.mark.parametrize(
    ("family", "name", "tag", "to"), in_turn(FILES, [("cuda:1", "cuda:3"), ("cuda:1", "cpu")], 1)
)
def test_it_is_as_training_there_would_have_saved_it(
    family: str, name: str, tag: str, to: str, made: Make, tmp_path: Path
) -> None:
    file, out = made(family, name, tag), tmp_path / "out"
    relocate(file.path, out, to=to)
    there = made(family, name, to).ours
    found = Made(family, name, out, file.expected, inspect(out)).ours
    own = OWN.get(name, {}).keys() | MIXED.get(name, set())
    for at in there.keys() - own:
        assert found[at].device == there[at].device, at
    assert {found[at].device for at in own} <= {to}
    twice, again = tmp_path / "twice", tmp_path / "again"
    assert relocate(out, twice, to=to).method == "clone"
    relocate(file.path, again, to=to)
    assert out.read_bytes() == twice.read_bytes() == again.read_bytes()


@by_few_turns
@pytest.mark.parametrize(("family", "name"), [file for file in FILES if file[1] not in OWN])
def test_there_and_back_is_the_same(family: str, name: str, made: Make, tmp_path: Path) -> None:
    file, there, back = made(family, name, "cuda:1"), tmp_path / "there", tmp_path / "back"
    relocate(file.path, there, map={"cuda:1": "privateuseone:15"}, all=True, allow_unmatched=True)
    relocate(there, back, map={"privateuseone:15": "cuda:1"}, all=True, allow_unmatched=True)
    assert told(inspect(back)) == told(file.manifest)


def told(manifest: Manifest) -> Any:
    """All that a manifest says, but for what is the file's own."""
    return replace(manifest, path="", nbytes=0).to_json()
