"""Build numpy arrays and scalars of plain dtypes: no objects, no fields.

Sources: numpy/_core/src/multiarray/methods.c (`array_reduce`), descriptor.c (`arraydescr_reduce`),
scalartypes.c.src (`gentype_reduce`). numpy is imported only if a checkpoint needs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import Any

from ..pickles.nodes import Call, Global, Node, Tuple

_PLAIN = re.compile(r"[<>|=]?(?:b1|i[1248]|u[1248]|f[248]|c8|c16|[SU]\d{1,6})")
_CORES = ("numpy.core.", "numpy._core.")


def is_plain(call: Call) -> bool:
    """Whether a call makes a dtype, an array or a scalar that this module can make."""
    args = call.args.items if isinstance(call.args, Tuple) else []
    if call.qualname == "numpy.dtype":
        return bool(args) and isinstance(args[0], str) and _PLAIN.fullmatch(args[0]) is not None
    if call.qualname in _RECONSTRUCT:
        state = call.state.items if isinstance(call.state, Tuple) else []
        kind = args[0] if args else None
        plain = isinstance(kind, Global) and kind.qualname == "numpy.ndarray"
        return plain and len(state) == 5 and _is_plain_dtype(state[2])
    if call.qualname in _SCALAR:
        return len(args) == 2 and _is_plain_dtype(args[0])
    return call.qualname in _FROM_BUFFER and len(args) == 4 and _is_plain_dtype(args[1])


def _is_plain_dtype(node: Node) -> bool:
    return isinstance(node, Call) and node.qualname == "numpy.dtype" and is_plain(node)


def ndarray() -> object:
    """Return the type of arrays, which every array names."""
    import numpy as np

    return np.ndarray


def _dtype(text: str, align: object = False, copy: object = True) -> object:
    import numpy as np

    return np.dtype(str(text), copy=True)  # a new one, because BUILD may change its state


def _reconstruct(kind: object, shape: object, typecode: object) -> object:
    import numpy as np

    return np.empty(0, np.uint8)


def _scalar(dtype: Any, content: Any) -> object:
    return _array(content, dtype, ())[()]


def _from_buffer(content: Any, dtype: Any, shape: Any, order: Any) -> object:
    return _array(content, dtype, shape, order)


def _array(content: Any, dtype: Any, shape: Any, order: Any = "C") -> Any:
    import numpy as np

    if type(content) not in (bytes, bytearray) or type(shape) is not tuple:
        raise TypeError("not an array's content and shape")
    if not all(type(n) is int and n >= 0 for n in shape) or order not in ("C", "F"):
        raise ValueError("not an array's shape and order")
    if dtype.hasobject or prod(shape) * dtype.itemsize != len(content):
        raise ValueError("not the number of bytes of the array")
    return np.ndarray(shape, dtype, content, order=order)


def give_state(made: Any, state: Any) -> None:
    """Apply BUILD to a dtype or an array; TypeError or ValueError if that is not possible."""
    import numpy as np

    if isinstance(made, np.dtype):
        version, order, *fields, itemsize, alignment, flags = state
        sizes = ((-1, -1), (made.itemsize, made.alignment))
        plain = fields == [None] * 3 and (itemsize, alignment) in sizes
        if version != 3 or order not in ("<", ">", "|", "=") or not plain:
            raise ValueError("not the state of a plain dtype")
        if flags not in (0, made.flags):
            raise ValueError("not the state of a plain dtype")
        made.__setstate__(state)  # type: ignore[attr-defined] # which numpy's types don't tell
    else:
        version, shape, dtype, by_columns, content = state
        order = "F" if by_columns is True else "C"
        array = _array(
            bytes(content) if type(content) is bytearray else content, dtype, shape, order
        )
        made.__setstate__((1, shape, array.dtype, by_columns is True, content))


_RECONSTRUCT = tuple(f"{core}multiarray._reconstruct" for core in _CORES)
_SCALAR = tuple(f"{core}multiarray.scalar" for core in _CORES)
_FROM_BUFFER = tuple(f"{core}numeric._frombuffer" for core in _CORES)
#: The function that makes each object, by the name of the callable.
ARRAYS: dict[str, Callable[..., object]] = {
    "numpy.dtype": _dtype,
    **dict.fromkeys(_RECONSTRUCT, _reconstruct),
    **dict.fromkeys(_SCALAR, _scalar),
    **dict.fromkeys(_FROM_BUFFER, _from_buffer),
}
