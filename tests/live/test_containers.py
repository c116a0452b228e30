"""One table takes objects apart for the list of a model's tensors and for batches."""

from __future__ import annotations

from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from ckptmove.live.inventory.object_walk import Reach
from ckptmove.live.transfer.to_device import _Contents, to_device


class Pair(NamedTuple):
    a: Any
    b: Any


class Longer(Pair):
    """Has more values than fields."""


class Words(dict[str, Any]):
    """A dict with attributes."""


class Row(list[Any]):
    """A list with attributes."""


class Slots:
    __slots__ = ("__own", "a", "nothing")

    def __init__(self) -> None:
        self.a, self.__own = one(), one()


class Once:
    __slots__ = iter(("a",))  # of which nothing is left after the class is made

    def __init__(self) -> None:
        self.a = one()


class Strange:
    """Its `__dict__` is code of its own."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise AssertionError("its code ran")


class Asks:
    def __init__(self) -> None:
        self._x = one()

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("its code ran")


@dataclass
class Sample:
    a: Any
    b: Any = None


@dataclass(frozen=True)
class Frozen:
    a: Any


def one() -> Tensor:
    return torch.ones(1)


def having(whole: Any, **attributes: Any) -> Any:
    vars(whole).update(attributes)
    return whole


def ring() -> Any:
    found: list[Any] = [one()]
    found.append((found, one()))
    return found


#: What it is, how a model's tensors within it are called, and how those of a batch are.
ZOO: list[tuple[Any, str, str | None]] = [
    ({"a": one(), 1: one(), b"x": [one()], None: one()}, "1 a b'x'.0 key 3", "1 None a b'x'.0"),
    (having(Words(a=one()), b=one()), "a b", None),
    (OrderedDict(a=one()), "a", None),
    (defaultdict(list, a=[one()]), "a.0", None),
    (having(Row([one()]), b=one()), "0 b", None),
    ((one(), (one(),)), "0 1.0", None),
    (Pair(one(), [one()]), "a b.0", None),
    (tuple.__new__(Longer, (one(), one(), one())), "2 a b", None),
    (torch.max(torch.ones(2, 2), 0), "0 1", None),
    ({one()}, "0", ""),
    (frozenset([one()]), "0", ""),
    (deque([one(), one()], 3), "0 1", None),
    (having(UserDict(a=one()), b=one()), "a b", None),
    (UserList([one()]), "0", None),
    (having(ChainMap({"a": one()}), b=one()), "b maps.0.a", "a b"),
    (MappingProxyType({"a": one()}), "a", None),
    (pack_sequence([torch.ones(2), one()]), "batch_sizes data", "data"),
    (Slots(), "_Slots__own a", None),
    (Once(), "a", None),
    (Strange(), "", None),
    (Asks(), "_x", None),
    (Sample(one(), Sample(one())), "a b.a", None),
    ([Frozen(one())], "0.a", None),
    (SimpleNamespace(a=one()), "a", None),
    ([torch.distributions.Normal(one(), one())], "0.loc 0.scale", None),
    (ring(), "0 1.1", "0.1.1 1.0.0"),
]


def spelled(paths: Iterable[Iterable[Any]]) -> str:
    return " ".join(sorted(".".join(map(str, path)) for path in paths))


@pytest.mark.parametrize("n", range(len(ZOO)))
def test_both_walks_find_the_same(n: int) -> None:
    value, walked, batch = ZOO[n]
    assert spelled(each.path for each in Reach().tensors_in(value, ())) == walked
    found = _Contents()
    found.add(value)
    names = spelled([found.name(key)] for key in found.leaves)
    assert names == (walked if batch is None else batch)
    moved = to_device(value, "meta")
    tensors = [each for each in Reach().tensors_in(moved, ()) if each.path != ("batch_sizes",)]
    assert type(moved) is type(value)
    assert len(tensors) == len(found.leaves)
    assert all(each.tensor.is_meta for each in tensors)


def test_a_model_lists_what_it_hides_and_a_batch_does_not() -> None:
    class Holder:
        def __init__(self) -> None:
            self.net = nn.Linear(1, 1)
            self.x = one()

    value = Holder()
    assert spelled(e.path for e in Reach().tensors_in(value, ())) == "net.bias net.weight x"
    assert to_device(value, "meta") is value
