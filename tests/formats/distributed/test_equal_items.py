"""What the checksums of items tell: names of the same bytes, and files that are copies."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove.errors import CkptmoveError, CorruptError
from tests.making.distributed import save_dcp
from tests.oracles.sameness import assert_same_tree

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


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_copied_over_that_of_another_rank_is_refused(verb: str, tmp_path: Path) -> None:
    state = {f"w{n}": torch.randn(4, 3) for n in range(3)} | {"zeros": torch.zeros(4, 3)}
    folder = divided(tmp_path / "dcp", state)
    VERBS[verb](folder)
    (tmp_path / "out.safetensors").unlink(missing_ok=True)
    shutil.copy(folder / "__0_0.distcp", folder / "__1_0.distcp")
    ckptmove.inspect(folder)  # reads no items
    error = CkptmoveError if verb == "validate" else CorruptError
    with pytest.raises(error) as raised:
        VERBS[verb](folder)
    told = str(ckptmove.validate(folder).of("container")) + str(raised.value)
    assert "the files of ranks 0 and 1 hold the same parts of all tensors" in told
    assert not (tmp_path / "out.safetensors").exists()


def test_ranks_may_have_the_same_of_some_tensors(tmp_path: Path) -> None:
    """Copies of one expert, and tensors of one value."""
    expert = torch.randn(1, 3).repeat(4, 1)
    same = {"up": expert, "down": expert + 1, "zeros": torch.zeros(4, 3)}
    folder = divided(tmp_path / "some", {**same, "router": torch.randn(4, 3)})
    assert_same_tree(ckptmove.load(folder), torch.load(tmp_path / "some.pt", weights_only=True))
    uniform = {f"w{n}": torch.full((4, 3), float(n)) for n in range(3)}
    folder = divided(tmp_path / "uniform", uniform)
    assert_same_tree(ckptmove.load(folder), uniform)
