"""The tree shows every tensor where its path says, for files of every family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptmove import Manifest, TensorEntry, inspect
from ckptmove.display.blocks import text_of
from ckptmove.display.phrases import show_name
from ckptmove.display.text import cut
from ckptmove.manifest.paths import spell
from ckptmove.reports.tree import tree
from tests.formats.test_torchscript_v1 import model, write
from tests.making.families import FAMILIES

# Nothing but the caller knows where in the file such a checkpoint starts.
UNREAD = {("legacy", "at_an_offset")}
FILES = [(f, name) for f, makers in FAMILIES.items() for name in makers if (f, name) not in UNREAD]


def chains(manifest: Manifest) -> Iterator[list[str]]:
    """Each line of the tree after those that lead there, without their indents."""
    chain: list[str] = []
    for n, line in enumerate(text_of(tree(manifest))):
        text = line.lstrip(" ")
        chain[(len(line) - len(text)) // 2 :] = [text]
        yield [] if n == 0 else list(chain)


def is_line_of(entry: TensorEntry, chain: list[str]) -> bool:
    """Whether a line says what the entry says, or that it was shown before, under its path."""
    keys = [spell((key,)) for key in entry.path]
    keys = [cut(show_name(key), 200) for key in keys]
    if not all(text.startswith(f"{key}:") for key, text in zip(keys, chain, strict=False)):
        return False
    if "(the same as " in chain[-1]:
        return len(chain) <= len(keys)
    shape = ", ".join(map(str, entry.shape)).replace("-1", "?")
    wanted = f"{keys[-1]}: {entry.dtype}[{shape}] {entry.device}"
    return len(chain) == len(keys) and chain[-1] == wanted


@pytest.mark.sample(40)
@pytest.mark.parametrize(("family", "name"), FILES)
def test_every_tensor_is_in_the_tree(family: str, name: str, tmp_path: Path) -> None:
    FAMILIES[family][name](tmp_path / "made.pt", "cuda:1")
    manifest = inspect(tmp_path / "made.pt")
    lines = [chain for chain in chains(manifest) if chain]
    for entry in manifest.tensors:
        if entry.part_of is None and entry.path:
            assert any(is_line_of(entry, chain) for chain in lines), entry.name
    assert "_rebuild_tensor" not in "\n".join(tree(manifest))
    held = {str(entry.path[0]) for entry in manifest.tensors if entry.path}
    besides = [line for line in manifest.lines(full=True) if line.startswith("other values: ")]
    named = {each.split(" ")[0] for line in besides for each in line[9:].split(", ")}
    assert not named & held


def test_attributes_of_a_script_are_beside_its_other_pickles(tmp_path: Path) -> None:
    FAMILIES["script"]["lite"](tmp_path / "made.pt", "cuda:1")
    lines = list(tree(inspect(tmp_path / "made.pt")))
    assert {"training: False", "shift: float32[3] cuda:1", "bytecode: tuple of 2"} <= {*lines}
    FAMILIES["script"]["frozen"](tmp_path / "frozen.pt", "cuda:1")
    lines = list(tree(inspect(tmp_path / "frozen.pt")))
    assert lines[1:3] == ["CONSTANTS: dict of 6", "  c0: float32[3, 3] cuda:1"]


def test_raw_tensors_without_a_pickle_have_lines(tmp_path: Path) -> None:
    lines = list(tree(inspect(write(tmp_path / "made.pt", model()))))
    assert lines[:4] == [
        "dict of 3",
        "weight: float32[2, 3] cuda:0",
        "inner: dict of 2",
        "  part: float32[2] cuda:0",
    ]
    at = lines.index("CONSTANTS: dict of 1")
    assert lines[at + 1] == "  c3: float32[0] cuda:0"
    assert lines[-2:] == ["<version>: code, 2 B", "<.data/serialization_id>: identity, 40 B"]
