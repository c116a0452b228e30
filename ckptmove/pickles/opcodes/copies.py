"""Price what calls copy of values that they share.

A pickle of a few megabytes can encode one text, or copy one list, by each of thousands of calls. A
pickler writes the arguments of each call anew, so the first call of a value has no price here: the
value itself was paid for. What later calls copy of it is priced by its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ...sources.budget import ITEM, PAIR
from ..nodes import Blob, Call, Dict, Global, List, Node, Persistent, Set, Tuple
from .plain_tensors import PlainTensor, StorageReference, compact_form

_MOST_NBYTES = 16  # of an element, of complex128
_NBYTES = {
    **dict.fromkeys(("torch.ByteStorage", "torch.CharStorage", "torch.BoolStorage"), 1),
    **dict.fromkeys(("torch.HalfStorage", "torch.BFloat16Storage", "torch.ShortStorage"), 2),
    **dict.fromkeys(("torch.FloatStorage", "torch.IntStorage"), 4),
    **dict.fromkeys(("torch.DoubleStorage", "torch.LongStorage"), 8),
}
#: The classes and functions that copy an argument, the first or the second, where torch or `load`
#: calls them.
_COPYING = frozenset(
    (
        "_codecs.encode",
        *(
            f"builtins.{name}"
            for name in ["bytearray", "bytes", "dict", "frozenset", "list", "set", "str", "tuple"]
        ),
        *(f"collections.{name}" for name in ("Counter", "OrderedDict", "deque")),
        *(
            f"{module}.{name}"
            for module in ("pathlib", "pathlib._local")
            for name in ["PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"]
        ),
        *("decimal.Decimal", "fractions.Fraction", "torch.Size"),
        *(
            f"{core}.{name}"
            for core in ("numpy.core", "numpy._core")
            for name in ("numeric._frombuffer", "multiarray.scalar")
        ),
    )
)
#: Those that make zeros if the argument is a number.
_ZEROS = ("builtins.bytearray", "builtins.bytes")
#: A function that calls another one.
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_WITH_STATE = "torch._utils._rebuild_parameter_with_state"
#: Functions that copy or check all elements of the tensors that they are given.
_SPARSE = "torch._utils._rebuild_sparse_tensor"
_READING = (
    *(_SPARSE, "torch._utils._rebuild_nested_tensor", "torch._utils._rebuild_qtensor"),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
)
_LEAST = 64  # bytes; smaller copies cost less than the call
_MOST_DIMENSIONS = 64
_LONGEST = 1 << 62  # elements along a dimension


class Copies:
    """The values that calls of one pickle copied, and the sizes of what they made."""

    def __init__(self) -> None:
        self._copied = set[int]()
        self._made = dict[int, int]()  # by the `id()` of a call

    def price(self, call: Call, *, zeros: bool = True) -> int:
        """The bytes that a new call copies of what other calls copied before.

        `zeros`: with those of a new bytearray of so many.
        """
        name, args = call.qualname or "", _items(call.args)
        price = 0
        if name == _FROM_TYPE and len(args) > 3:
            function, _, inner, state = args[:4]
            name = function.qualname if isinstance(function, Global) else ""
            args, price = _items(inner), self.price_of_state(state)
        if name in _COPYING and args:
            first = args[0]
            if name in _ZEROS and isinstance(first, int):
                size = self._made[id(call)] = max(0, first) if zeros else 0
                return price + size
            self._made[id(call)] = self._size(first)
            return price + sum(map(self._again, args[:2]))
        if name == _WITH_STATE and len(args) > 3:
            return price + self.price_of_state(args[3])
        if name in _READING:
            parts = (*args, *(_items(args[1]) if name == _SPARSE and len(args) > 1 else ()))
            price += sum(map(self._of_tensor, parts))
        return price

    def price_of_state(self, state: Node) -> int:
        """The bytes that an object copies of a state, if another object copied them before."""
        return sum(map(self._again, _items(state) or [state]))

    def _again(self, node: Node) -> int:
        """The size of a value, unless this is its first copy."""
        size = self._size(node)
        if size < _LEAST:
            return 0
        if id(node) in self._copied:
            return size
        self._copied.add(id(node))
        return 0

    def _size(self, node: Node) -> int:
        """The bytes that a copy of a value takes."""
        if isinstance(node, (str, bytes)):
            return len(node)
        if isinstance(node, Blob):
            return node.nbytes
        if isinstance(node, (Tuple, List, Set)):
            return ITEM * len(node.items)
        if isinstance(node, Dict):
            return PAIR * len(node.pairs)
        if isinstance(node, Call):
            more = ITEM * len(node.items) + PAIR * len(node.pairs)
            return self._made.get(id(node), 0) + more
        return 0

    def _of_tensor(self, node: Node) -> int:
        """The bytes that a function copies of a tensor that repeats elements, or is used again."""
        if not isinstance(node, Call):
            return 0
        form = compact_form(node)
        args = () if form is not None else _items(node.args)
        storage = args[0] if args else None
        shape: Sequence[Node] = _items(args[2]) if len(args) > 2 else ()
        if form is not None and isinstance(node, PlainTensor):
            storage, shape = node.storage, form.shape
        if len(shape) > _MOST_DIMENSIONS:
            return 0  # torch refuses it
        elements = prod(min(max(0, n), _LONGEST) for n in shape if isinstance(n, int))
        kind, numel = _class_and_numel(storage)
        nbytes = _NBYTES.get(kind.qualname if isinstance(kind, Global) else "", _MOST_NBYTES)
        if id(node) in self._copied:
            return nbytes * elements
        self._copied.add(id(node))
        return nbytes * max(0, elements - (numel if isinstance(numel, int) else 0))


def _class_and_numel(storage: Node) -> tuple[Node, Node]:
    """The class and the number of elements that the persistent id of a storage states."""
    if type(storage) is StorageReference:
        return storage.form.storage_class, storage.form.numel
    pid = _items(storage.pid) if isinstance(storage, Persistent) else ()
    return (pid[1] if len(pid) > 1 else None), (pid[4] if len(pid) > 4 else 0)


def _items(node: Node) -> Sequence[Node]:
    return node.items if isinstance(node, Tuple) else ()
