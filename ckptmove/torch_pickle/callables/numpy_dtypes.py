"""Check that numpy dtypes in a pickle describe only memory that belongs to them.

numpy trusts the state of a dtype: a field beyond the end of its element is read and written at the
offset that the state gives, and bytes of numbers can be declared to be object references. Both let
a file write into the memory of the process that loads it. So a state must be one that numpy writes:
each field and subarray within its element, and flags for objects exactly if there are objects.

Source: numpy's descriptor.c (`arraydescr_setstate`, `_arraydescr_reduce`), versions 1.7 to 2.4.
"""

from __future__ import annotations

import math
import re

from ...pickles.nodes import Call, Dict, Node, Tuple

#: Letters of numpy's plain dtypes; `O`, for objects, is excluded: it returns any object it is
#: given.
PLAIN = re.compile(r"[<>=|]?([?a-zA-NP-Z])([0-9]{0,9})(\[\w{1,9}\])?")
_OBJECT = re.compile(r"\|?O[48]?")
_FLEXIBLE = "SaUV"  # of any size, which the state gives
_REFERENCES = 3  # flags of dtypes that hold objects: reference-counted, and pickled as a list
_VERSIONS = (3, 4)  # of the state; 4 adds metadata


def is_right(args: list[Node], call: Call) -> bool:
    """Whether a call of `numpy.dtype`, with its state, makes a dtype that numpy could pickle."""
    if not args:
        return False
    if not call.built:
        return True
    state = list(call.state.items) if isinstance(call.state, Tuple) else []
    if not 8 <= len(state) <= 9 or state[0] not in _VERSIONS:
        return False
    _, _, subarray, names, fields, _, alignment, flags = state[:8]
    if not isinstance(flags, int) or alignment not in (-1, 0, 1, 2, 4, 8, 16, 32, 64):
        return False
    size = _size(call)
    inner = [*_of_subarray(subarray, size), *_of_fields(names, fields, size)]
    if None in inner:
        return False
    objects = _is_of_objects(args[0]) or any(_holds_objects(each) for each in inner)
    plain = isinstance(args[0], str) and PLAIN.fullmatch(args[0]) is not None
    return (flags & _REFERENCES == _REFERENCES) == objects and (plain or objects)


def _of_subarray(node: Node, size: int | None) -> list[Call | None]:
    """The dtype of a subarray, if there is one; None if it does not fill its element."""
    if node is None:
        return []
    items = list(node.items) if isinstance(node, Tuple) else []
    base, shape = items if len(items) == 2 else (None, None)
    lengths = list(shape.items) if isinstance(shape, Tuple) else [shape]
    numbers = [each for each in lengths if isinstance(each, int) and each >= 0]
    if not isinstance(base, Call) or len(numbers) < len(lengths):
        return [None]
    each = _size(base)
    fits = each is not None and each * math.prod(numbers) == size
    return [base if fits else None]


def _of_fields(names: Node, fields: Node, size: int | None) -> list[Call | None]:
    """The dtypes of fields, if there are any; None for a field that is not inside its element."""
    if names is None and fields is None:
        return []
    if not isinstance(names, Tuple) or not isinstance(fields, Dict) or size is None:
        return [None]
    keys = [key for key, _ in fields.pairs if isinstance(key, str)]
    found: list[Call | None] = [] if all(name in keys for name in names.items) else [None]
    for _, field in fields.pairs:
        items = list(field.items) if isinstance(field, Tuple) else []
        dtype, at = items[:2] if 2 <= len(items) <= 3 else (None, None)
        each = _size(dtype) if isinstance(dtype, Call) else None
        fits = isinstance(at, int) and each is not None and 0 <= at <= size - each
        found.append(dtype if fits and isinstance(dtype, Call) else None)
    return found


def _size(call: Call) -> int | None:
    """The size of an element in bytes, from the call of a dtype.

    Its state is checked separately.
    """
    args = call.args.items if isinstance(call.args, Tuple) else []
    kind = args[0] if args else None
    if call.qualname != "numpy.dtype" or not isinstance(kind, str):
        return None
    if _OBJECT.fullmatch(kind):
        return 8
    found = PLAIN.fullmatch(kind)
    if found is None or not found[2]:
        return {"?": 1, "M": 8, "m": 8}.get(found[1]) if found is not None else None
    state = call.state.items if call.built and isinstance(call.state, Tuple) else []
    if found[1] in _FLEXIBLE and len(state) > 5:
        said = state[5]
        return said if isinstance(said, int) and said >= 0 else None
    return int(found[2]) * (4 if found[1] == "U" else 1)


def _is_of_objects(kind: Node) -> bool:
    return isinstance(kind, str) and _OBJECT.fullmatch(kind) is not None


def _holds_objects(dtype: Call | None) -> bool:
    """Whether the flags or the arguments of a dtype say that it holds objects."""
    if dtype is None:
        return True
    state = dtype.state.items if dtype.built and isinstance(dtype.state, Tuple) else []
    flags = state[7] if len(state) > 7 else 0
    args = dtype.args.items if isinstance(dtype.args, Tuple) else []
    return _is_of_objects(args[0] if args else None) or (
        isinstance(flags, int) and flags & _REFERENCES == _REFERENCES
    )
