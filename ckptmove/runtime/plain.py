"""Build plain Python objects from checked arguments.

None of these constructors runs code of the file, opens a file, or uses more memory than its
arguments. Invalid arguments raise TypeError or ValueError.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import fractions
import pathlib
import re
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import CorruptError

_LATIN_1 = ("latin1", "latin-1", "latin_1", "iso-8859-1", "iso8859-1")
_MOST_ALIKE = 100  # different keys with the same hash; by chance there are hardly two
_LARGEST_KEY = 4096  # items of the tuples and frozensets in a key, counted at each occurrence
_LONGEST_NUMBER = 4000  # digits
#: Names that stand for a value by themselves, in addition to those that torch allows.
TYPES: dict[str, object] = {
    **{
        f"builtins.{kind.__name__}": kind
        for kind in (
            *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, object, range),
            *(set, slice, str, tuple),
        )
    },
    "collections.defaultdict": defaultdict,
    "collections.deque": deque,
}
_FACTORIES = (bool, bytes, dict, float, frozenset, int, list, set, str, tuple)


def _need(value: object, *kinds: type) -> Any:
    """The value, if its type is exactly one of `kinds`; else a TypeError."""
    if type(value) not in kinds:
        raise TypeError(f"{type(value).__name__} is not expected here")
    return value


def keys_of(values: Iterable[object]) -> list[object]:
    """The values as keys of a dict or items of a set.

    Raises CorruptError if a value can't be a key, or if the hashes collide so often that building
    the dict or set would take too long.
    """
    keys = [key_of(value) for value in values]
    if len(keys) > _MOST_ALIKE:
        ((found, most),) = Counter(map(hash, keys)).most_common(1)
        if most > _MOST_ALIKE and _differ(key for key in keys if hash(key) == found):
            raise CorruptError("a dict has too many keys with the same hash")
    return keys


def _differ(keys: Iterable[object]) -> bool:
    """Whether there are too many different keys among keys with the same hash."""
    found: list[object] = []
    for key in keys:
        if key not in found:
            found.append(key)
        if len(found) > _MOST_ALIKE:
            return True
    return False


def key_of(value: object) -> object:
    """The value; raises CorruptError if it can't be a key, or hashing it would take too long."""
    if type(value) in (tuple, frozenset):
        todo: list[Any] = [value]
        count = 0
        while todo:
            each = todo.pop()
            count += 1
            if type(each) in (tuple, frozenset):
                count += len(each)
                if count > _LARGEST_KEY:
                    raise CorruptError("a key is too large")
                todo.extend(each)
    try:
        hash(value)
    except Exception as error:
        raise CorruptError(f"{type(value).__name__} can't be a key or in a set") from error
    return value


def _encode(text: object, encoding: object = "utf-8") -> object:
    if encoding in _LATIN_1:
        return _need(text, str).encode("latin-1")
    if encoding in ("utf-8", "utf8"):
        return _need(text, str).encode()
    raise ValueError("another encoding")


def _bytearray(content: object = b"", encoding: object = None) -> object:
    if encoding is not None:
        content = _encode(content, encoding)
    return bytearray(_need(content, bytes, bytearray))


def _bytes(content: object = b"") -> object:
    return bytes(_need(content, bytes, bytearray))


def _complex(real: object = 0, imaginary: object = 0) -> object:
    return complex(_need(real, int, float, bool), _need(imaginary, int, float, bool))


def _range(*bounds: object) -> object:
    return range(*(_need(each, int) for each in bounds))


def _slice(*bounds: object) -> object:
    return slice(*(_need(each, int, type(None)) for each in bounds))


def _size(sizes: object = ()) -> object:
    return torch.Size([_need(each, int) for each in _need(sizes, tuple, list)])


def _device(kind: object, index: object = None) -> object:
    if index is None:
        return torch.device(_need(kind, str))
    return torch.device(_need(kind, str), _need(index, int))


def _layout(name: object) -> object:
    return torch.serialization._get_layout(_need(name, str))


def _new_ordered_dict() -> object:
    return OrderedDict()


def _counter(counts: object = None) -> object:
    counter: Counter[object] = Counter()
    counter.update(_need({} if counts is None else counts, dict))
    return counter


def _defaultdict(factory: Any = None) -> object:
    if factory is not None and factory not in (*_FACTORIES, OrderedDict, Counter):
        raise TypeError("another factory")
    return defaultdict(factory)


def _deque(items: object = (), longest: object = None) -> object:
    return deque(_need(items, list, tuple), _need(longest, int, type(None)))


def _namespace() -> object:
    return argparse.Namespace()


def _when(kind: Any) -> Callable[..., object]:
    def make(*parts: object) -> object:
        kinds = (int, bytes, datetime.timedelta, datetime.timezone, str, type(None))
        return kind(*(_need(each, *kinds) for each in parts))

    return make


def _decimal(text: object) -> object:
    if len(_need(text, str)) > _LONGEST_NUMBER:
        raise ValueError("a very long number")
    return decimal.Decimal(_need(text, str))


def _fraction(first: object, second: object = 1) -> object:
    if isinstance(first, str):  # pickles contain only this form, never one with an exponent
        found = re.fullmatch(
            rf"(-?\d{{1,{_LONGEST_NUMBER}}})(?:/(\d{{1,{_LONGEST_NUMBER}}}))?", first
        )
        if found is None:
            raise ValueError("not a fraction")
        first, second = int(found[1]), int(found[2] or 1)
    return fractions.Fraction(_need(first, int), _need(second, int))


def _uuid() -> object:
    return uuid.UUID(int=0)  # its state will set the number


def _path(kind: type[pathlib.PurePath], pure: type[pathlib.PurePath]) -> Callable[..., object]:
    def make(*parts: object) -> object:
        texts = [_need(each, str) for each in parts]
        try:
            return kind(*texts)
        except NotImplementedError:  # a path of another operating system
            return pure(*texts)

    return make


#: Name of a callable in a pickle → the function that makes the object.
PLAIN: dict[str, Callable[..., object]] = {
    "_codecs.encode": _encode,
    "argparse.Namespace": _namespace,
    "builtins.bytearray": _bytearray,
    "builtins.bytes": _bytes,
    "builtins.complex": _complex,
    "builtins.frozenset": lambda items=(): frozenset(keys_of(_need(items, list, tuple))),
    "builtins.list": lambda items=(): list(_need(items, list, tuple)),
    "builtins.range": _range,
    "builtins.set": lambda items=(): set(keys_of(_need(items, list, tuple))),
    "builtins.slice": _slice,
    "collections.Counter": _counter,
    "collections.OrderedDict": _new_ordered_dict,
    "collections.defaultdict": _defaultdict,
    "collections.deque": _deque,
    "decimal.Decimal": _decimal,
    "fractions.Fraction": _fraction,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "uuid.UUID": _uuid,
    **{
        f"datetime.{kind.__name__}": _when(kind)
        for kind in (
            *(datetime.date, datetime.datetime, datetime.time),
            *(datetime.timedelta, datetime.timezone),
        )
    },
    **{
        f"{module}.{kind.__name__}": _path(kind, pure)
        for module in ("pathlib", "pathlib._local")
        for kind, pure in (
            (pathlib.PurePosixPath, pathlib.PurePosixPath),
            (pathlib.PosixPath, pathlib.PurePosixPath),
            (pathlib.PureWindowsPath, pathlib.PureWindowsPath),
            (pathlib.WindowsPath, pathlib.PureWindowsPath),
        )
    },
}


def give_state(made: object, state: object) -> None:
    """Apply BUILD to an object that `PLAIN` made; raises TypeError or ValueError if it can't."""
    if state is None:
        return
    if isinstance(made, uuid.UUID):
        number = uuid.UUID(int=_need(state, dict)["int"]).int  # the constructor checks it
        made.__setstate__({"int": number})  # type: ignore[attr-defined] # typeshed has none
    elif type(made) in (OrderedDict, Counter, argparse.Namespace):
        for name in _need(state, dict):
            _need(name, str)
        vars(made).update(_need(state, dict))
    else:
        raise TypeError(f"{type(made).__name__} takes no state")
