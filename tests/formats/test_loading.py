"""Tensors that are loaded right from a header or a pickle are those that are loaded from nodes."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmove
from ckptmove import CkptmoveError
from ckptmove.formats import loading
from ckptmove.runtime.mapped_tensors import Odd
from tests.making.checkpoints import MAKERS, save
from tests.making.mutating import mutated
from tests.oracles.sameness import assert_same_tree

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

ODD = {
    "scalar": torch.tensor(-0.0),
    "byte": torch.arange(3, dtype=torch.uint8),  # after it, nothing is aligned
    "half": torch.full((2, 1, 3), float("nan"), dtype=torch.half),
    "complex": torch.ones(2, 2, dtype=torch.complex64),
    "float8": torch.ones(5).to(torch.float8_e4m3fn),
    "bool": torch.tensor([[True], [False]]),
    "unsigned": torch.ones(3, dtype=torch.uint16),
}
WHOLE = torch.arange(12.0)
#: What pickles of plain tensors may hold: views that share, gradients, empty ones, other objects.
PLAIN = {
    "model": OrderedDict(
        a=WHOLE[2:6],
        b=WHOLE.view(3, 4).t(),
        c=WHOLE,
        d=WHOLE[:0],
        half=ODD["half"],
        bool=ODD["bool"],
    ),
    "twice": [WHOLE, WHOLE],
    "grad": torch.ones(2, requires_grad=True),
    "strided": torch.ones(5).expand(3, 5),
    "rest": (1, None, {2.5: "text", True: []}),
}


class Taken:
    """Whether the direct way was taken, each time; none is, if `refusing`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ways: list[bool] = []
        self.refusing = False
        self.direct = loading._plain_object
        monkeypatch.setattr(loading, "_plain_object", self)

    def __call__(self, *given: object) -> object:
        try:
            if self.refusing:
                raise Odd
            found = self.direct(*given)  # type: ignore[arg-type]
        except Odd:
            self.ways.append(False)
            raise
        self.ways.append(True)
        return found


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    return Taken(monkeypatch)


def bits(tensor: torch.Tensor) -> object:
    """All that there is to a tensor."""
    content = bytes(tensor.contiguous().reshape(-1).view(torch.uint8))
    storage = tensor.untyped_storage().nbytes(), tensor.storage_offset(), tensor.stride()
    return content, tensor.dtype, tensor.shape, storage, tensor.requires_grad, type(tensor)


@pytest.mark.parametrize("extra", [{}, {"empty": torch.zeros(0, 3)}], ids=["plain", "with empty"])
def test_loaded_from_the_header_or_from_nodes(
    extra: dict[str, torch.Tensor], tmp_path: Path, taken: Taken
) -> None:
    path = tmp_path / "a.safetensors"
    save_file({**ODD, **extra}, path)
    loaded = ckptmove.load(path)
    assert taken.ways == [not extra]
    asked: list[str] = []
    slowly = ckptmove.load(path, map_location=lambda storage, tag: asked.append(tag))
    assert taken.ways[1:] == [False]
    theirs = load_file(path)
    assert type(loaded) is type(slowly) is dict
    assert list(loaded) == list(slowly)
    assert len(asked) == len(theirs)
    for name, tensor in theirs.items():
        assert bits(loaded[name]) == bits(slowly[name])
        assert bits(tensor)[:3] == bits(loaded[name])[:3]  # type: ignore[index]
    loaded["byte"][0] = 9
    assert load_file(path)["byte"][0] == 0


def test_loaded_from_the_pickle(tmp_path: Path, taken: Taken) -> None:
    path = tmp_path / "a.pt"
    for saved, direct in ((PLAIN, True), ({"storage": WHOLE.storage()}, False)):
        torch.save(saved, path)
        taken.ways.clear()
        loaded = ckptmove.load(path)
        assert taken.ways == [direct]
        theirs = torch.load(path, weights_only=direct)
        assert_same_tree(theirs, loaded)


@pytest.mark.sample(40)
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_the_direct_way_gives_what_nodes_give(name: str, tmp_path: Path, taken: Taken) -> None:
    path = save(tmp_path / "a.pt", MAKERS[name]())
    assert_alike(path, taken)


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_the_direct_way_refuses_what_nodes_refuse(kind: str, tmp_path: Path, taken: Taken) -> None:
    path = tmp_path / f"a.{kind}"
    torch.save(PLAIN, path) if kind == "pt" else save_file(ODD, path)
    whole, dice = path.read_bytes(), Random(7)
    for _ in range(100):
        path.write_bytes(mutated(whole, [whole], dice))
        assert_alike(path, taken)
    assert any(taken.ways)


def assert_alike(path: Path, taken: Taken) -> None:
    """Load a file both ways: the same object, or the same error."""
    found = []
    for taken.refusing in (False, True):
        try:
            found.append(ckptmove.load(path, map_location="cpu"))
        except CkptmoveError as error:
            found.append((type(error).__name__, str(error)))
    if taken.ways[-2:] != [False, False]:
        assert_same_tree(*found)
