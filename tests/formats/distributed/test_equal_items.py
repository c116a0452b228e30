"""What the checksums of items tell: names of the same bytes, and files that are copies."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import ckptmove
from ckptmove import formats
from ckptmove.errors import CkptmoveError, CorruptError
from ckptmove.formats.distributed.dcp.equal_items import _layouts
from ckptmove.formats.distributed.dcp.metadata import SavedState
from ckptmove.formats.distributed.dcp.metadata_walk import ItemRange
from tests.making.distributed import save_dcp
from tests.making.ranks import divided as divided_rows
from tests.making.ranks import save_dcp_ranks
from tests.oracles.sameness import assert_same_tree

SAME_FILES = "__0_0.distcp, __1_0.distcp are the same bytes"
SAME_BYTES = "have the same bytes, as tied weights do: "


def divided(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    """What two ranks would save."""
    torch.save(state, folder.with_suffix(".pt"))
    ckptmove.convert(folder.with_suffix(".pt"), folder, format="dcp", ranks=2)
    return folder


def test_names_of_the_same_bytes_are_told(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    state = {"embed": weight, "head": weight, "mask": torch.ones(4, 3), "bias": torch.ones(4, 3)}
    state |= {"whole": torch.arange(3), "wide": torch.arange(3).view(torch.float64)}
    rows = [((0, 0), (2, 3)), ((2, 0), (2, 3))]
    folder = save_dcp(tmp_path / "dcp", state, {"embed": rows, "head": rows})
    told = ckptmove.convert(folder, tmp_path / "out.safetensors").warnings
    assert told == (f"{SAME_BYTES}embed = head",)


VERBS: dict[str, Callable[[Path], object]] = {
    "convert": lambda path: ckptmove.convert(path, path.with_name("out.safetensors")),
    "load": ckptmove.load,
    "validate": lambda path: ckptmove.validate(path).raise_if_failed(),
    "diff": lambda path: ckptmove.diff(path, path.with_suffix(".pt")),
}


def told_by(verb: str, folder: Path) -> str:
    """What a verb says of a folder, whose conversion may be there already; it must not fail."""
    if verb == "convert":
        out = folder.with_name("out.safetensors")
        return str(ckptmove.convert(folder, out, force=True).warnings)
    if verb == "validate":
        checked = ckptmove.validate(folder)
        checked.raise_if_failed()
        return str(checked.warnings)
    VERBS[verb](folder)
    return ""


@pytest.mark.parametrize("verb", VERBS)
def test_a_copy_with_items_of_another_rank_is_refused(verb: str, tmp_path: Path) -> None:
    """The first rank has `last` too: its file, under the name of the other, is no file of that."""
    state = {name: torch.randn(4, 3) for name in ("up", "down")} | {"last": torch.randn(1, 3)}
    folder = divided(tmp_path / "dcp", state)
    assert SAME_FILES not in told_by(verb, folder)
    (tmp_path / "out.safetensors").unlink(missing_ok=True)
    shutil.copy(folder / "__0_0.distcp", folder / "__1_0.distcp")
    ckptmove.inspect(folder)  # reads no items
    error = CkptmoveError if verb == "validate" else CorruptError
    with pytest.raises(error) as raised:
        VERBS[verb](folder)
    told = str(ckptmove.validate(folder).of("container")) + str(raised.value)
    assert "__1_0.distcp is a copy of __0_0.distcp: it has items that belong only there" in told
    assert not (tmp_path / "out.safetensors").exists()


def test_a_copy_is_refused_as_often_as_it_is_read(tmp_path: Path) -> None:
    state = {name: torch.randn(4, 3) for name in ("up", "down")} | {"last": torch.randn(1, 3)}
    folder = divided(tmp_path / "dcp", state)
    shutil.copy(folder / "__0_0.distcp", folder / "__1_0.distcp")
    with formats.open_checkpoint(str(folder)) as found:
        for _ in range(2):
            with pytest.raises(CorruptError):
                found.container.proofs(next(iter(found.container.storages)))


@pytest.mark.parametrize("verb", ["convert", "validate"])
def test_a_copy_cut_to_the_size_of_another_ranks_file_is_told(verb: str, tmp_path: Path) -> None:
    """All of its items are there, and of the right shapes; `last` of the first rank is cut off."""
    state = {name: torch.randn(4, 3) for name in ("up", "down")} | {"last": torch.randn(1, 3)}
    folder = divided(tmp_path / "dcp", state)
    said = "all items of __1_0.distcp are also in __0_0.distcp: either"
    assert said not in told_by(verb, folder)
    size = (folder / "__1_0.distcp").stat().st_size
    (folder / "__1_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes()[:size])
    assert told_by(verb, folder).count(said) == 1


def test_layouts_are_compared_in_proportion_to_the_items() -> None:
    """Each of many files has all places of the one before; two of very many others are alike."""
    places = {f"nested{n}": [(100 * k, 100) for k in range(n + 1)] for n in range(200)}
    places |= {f"apart{n}": [(0, 100), (100, n)] for n in range(1, 1100)}
    places |= {"one": [(0, 77)], "other": [(0, 77)]}
    spans = [ItemRange(file, *place) for file, each in places.items() for place in each]
    saved = SavedState(blobs={str(n): span for n, span in enumerate(spans)})
    found = _layouts(saved, places)
    assert sum(len(each.places) * len(each.files) for each in found) < 10 * len(spans)
    assert ["one", "other"] in [each.files for each in found]


@pytest.mark.parametrize("verb", VERBS)
def test_files_of_the_same_bytes_are_told(verb: str, tmp_path: Path) -> None:
    """As of ranks whose data are equal; which is not to be told from a copy."""
    state = {name: torch.randn(2, 3).repeat(2, 1) for name in ("up", "down")}
    folder = divided(tmp_path / "dcp", state)
    assert (folder / "__0_0.distcp").read_bytes() == (folder / "__1_0.distcp").read_bytes()
    told = told_by(verb, folder)
    assert told.count(SAME_FILES) == (verb in ("convert", "validate"))
    assert_same_tree(ckptmove.load(folder), state)


def test_experts_that_were_one_layer_are_not_called_copies(tmp_path: Path) -> None:
    """All that both ranks have a part of is equal, and the files are not: one has more."""
    experts = {f"experts.w{n}": torch.randn(1, 8, 4) for n in range(3)}
    more = {"attn": torch.randn(8, 8)}

    def state(_: int) -> dict[str, Any]:
        return more | {name: divided_rows(each, (2,), [Shard(0)]) for name, each in whole.items()}

    whole = {name: each.repeat(2, 1, 1) for name, each in experts.items()}
    folder = save_dcp_ranks(tmp_path / "dcp", 2, state)
    ckptmove.validate(folder).raise_if_failed()
    assert not ckptmove.convert(folder, tmp_path / "out.safetensors").warnings
    assert_same_tree(ckptmove.load(folder), more | whole)


def test_ranks_may_have_the_same_of_some_tensors(tmp_path: Path) -> None:
    """Copies of one expert, and tensors of one value."""
    expert = torch.randn(1, 3).repeat(4, 1)
    same = {"up": expert, "down": expert + 1, "zeros": torch.zeros(4, 3)}
    folder = divided(tmp_path / "some", {**same, "router": torch.randn(4, 3)})
    assert_same_tree(ckptmove.load(folder), torch.load(tmp_path / "some.pt", weights_only=True))
    uniform = {f"w{n}": torch.full((4, 3), float(n)) for n in range(3)}
    folder = divided(tmp_path / "uniform", uniform)
    assert_same_tree(ckptmove.load(folder), uniform)
