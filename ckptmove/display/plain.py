"""Convert between JSON and classes that declare it by their annotations; also its schema.

Each field of a dataclass or named tuple is a key, in order and by name. `Key` in an annotation
changes that, and `derived_key` adds computed keys. `Any` stays as it is.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as hints_of

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


class Key(NamedTuple):
    """How a field shows in JSON, as in `path: Annotated[str, Key("source")]`."""

    name: str = ""  #: the key; by default the name of the field
    after: str = ""  #: the key before it; by default, fields keep their order
    plain: Callable[[Any], Any] | None = None  #: returns the value for JSON
    gives: Any = None  #: the type of `plain`'s result
    shown: Callable[[Any], object] | None = None  #: from the object: is the key present?
    omitted: bool = False  #: whether the key is never present


OMITTED = Key(omitted=True)
Seconds = Annotated[float, Key(plain=lambda seconds: round(seconds, 3))]


class DerivedKey(cached_property[T]):
    """A property, computed once, that is also a key of the JSON; see `derived_key`."""

    key: Key


def derived_key(after: str, name: str = "") -> Callable[[Callable[[Any], T]], DerivedKey[T]]:
    """Make a property that is also a key of the JSON, after another key."""

    def declare(function: Callable[[Any], T]) -> DerivedKey[T]:
        found = DerivedKey(function)
        found.key = Key(name, after)
        return found

    return declare


class Plain:
    """A dataclass that can be written as JSON, and read back."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return to_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Build one from the plain data of `to_json`, for example from another process.

        Raises:
            ValueError: the data does not have that form.
        """
        try:
            found: Self = _object(cls).read(data)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no {cls.__name__.lower()}: {error!r}") from error
        return found

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Self:
        """The old name of `from_json`."""
        return cls.from_json(data)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON Schema of what `to_json` returns."""
        return _object(cls).schema()


def to_json(value: Any) -> dict[str, Any]:
    """Convert a dataclass or named tuple to plain data for JSON."""
    return _object(type(value)).plain(value)


# -- types -----------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """The conversion of the values of a type."""

    plain: Callable[[Any], Any] | None  #: converts values for JSON; None if they need no conversion
    read: Callable[[Any], Any]  #: converts values from JSON; raises ValueError
    schema: dict[str, Any]


@cache
def _form(kind: Any) -> _Form:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        form, key = _form(args[0]), _key_of(kind)
        schema = form.schema if key.gives is None else _form(key.gives).schema
        return form._replace(plain=key.plain or form.plain, schema=schema)
    if origin in (Union, types.UnionType):
        return _union([_form(each) for each in args])
    if origin in (tuple, list, Sequence):
        return _items(_form(args[0]))
    if origin in (dict, Mapping):
        return _mapping(_form(args[0]), _form(args[1]))
    if kind in _SCALARS:
        accepted = (int, float) if kind is float else kind
        return _Form(None, _reader(accepted), {"type": _SCALARS[kind]})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _Form(str, kind, {"enum": [str(each) for each in kind]})
    if isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields")):
        found = _object(kind)
        return _Form(found.plain, found.read, found.schema())
    return _Form(None, lambda value: value, {})


def _reader(kind: Any) -> Callable[[Any], Any]:
    def read(value: object) -> object:
        if not isinstance(value, kind):
            raise ValueError(f"{value!r} is no {kind}")
        return value

    return read


def _union(forms: Sequence[_Form]) -> _Form:
    """Return the form of a type or None; other unions must be of scalars, kept unchanged."""
    schema = {"anyOf": [form.schema for form in forms]}
    rest = [form for form in forms if form.schema.get("type") != "null"]
    if len(rest) > 1 or len(rest) == len(forms):
        return _Form(None, lambda value: value, schema)
    plain, read = rest[0].plain, rest[0].read
    return _Form(
        None if plain is None else lambda value: None if value is None else plain(value),
        lambda value: None if value is None else read(value),
        schema,
    )


def _items(item: _Form) -> _Form:
    plain, is_list = item.plain, _reader((list, tuple))
    return _Form(
        list if plain is None else lambda value: list(map(plain, value)),
        lambda value: tuple(map(item.read, is_list(value))),
        {"type": "array", "items": item.schema},
    )


def _mapping(name: _Form, item: _Form) -> _Form:
    spell, plain = name.plain or str, item.plain or (lambda value: value)
    is_mapping = _reader(Mapping)
    return _Form(
        dict
        if name.plain is item.plain is None
        else lambda value: {spell(key): plain(each) for key, each in value.items()},
        lambda value: {key: item.read(each) for key, each in is_mapping(value).items()},
        {"type": "object", "additionalProperties": item.schema},
    )


# -- classes ---------------------------------------------------------------------------------------


class _Member(NamedTuple):
    """A key in JSON: a field, or a computed value."""

    attribute: str
    kind: Any
    key: Key
    is_field: bool = True

    @property
    def name(self) -> str:
        return self.key.name or self.attribute


class _Object:
    """The keys of a class in order, and their conversions."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._members = _in_order([each for each in _members(kind) if not each.key.omitted])
        self._names = [each.name for each in self._members]
        self._get = attrgetter(*(each.attribute for each in self._members), "__class__")
        self._forms = {each.name: _form(each.kind) for each in self._members}
        self._plain = [(name, form.plain) for name, form in self._forms.items() if form.plain]
        self._shown = {e.name: e.key.shown for e in self._members if e.key.shown is not None}

    def plain(self, value: Any) -> dict[str, Any]:
        said = dict(zip(self._names, self._get(value)))  # noqa: B905 one more is got, so always several
        for name, plain in self._plain:
            said[name] = plain(said[name])
        for name, shown in self._shown.items():
            if not shown(value):
                del said[name]
        return said

    def read(self, data: Mapping[str, Any]) -> Any:
        fields_of = [each for each in self._members if each.is_field]
        return self._kind(
            **{
                each.attribute: self._forms[each.name].read(data[each.name])
                for each in fields_of
                if each.name in data or each.name not in self._shown
            }
        )

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {name: form.schema for name, form in self._forms.items()},
            "required": [name for name in self._names if name not in self._shown],
            "additionalProperties": False,
        }


def _object(kind: Any) -> _Object:
    """The `_Object` of a class, cached."""
    if kind not in _OBJECTS:
        _OBJECTS[kind] = _Object(kind)
    return _OBJECTS[kind]


_OBJECTS: dict[Any, _Object] = {}


def _members(kind: Any) -> Iterator[_Member]:
    hints = hints_of(kind, include_extras=True)
    if hasattr(kind, "schema"):
        yield _Member("schema", int, Key(), is_field=False)
    for name in [each.name for each in fields(kind)] if is_dataclass(kind) else kind._fields:
        yield _Member(name, hints[name], _key_of(hints[name]))
    for base in reversed(kind.__mro__):
        for name, found in vars(base).items():
            if isinstance(found, DerivedKey):
                returned = hints_of(found.func, include_extras=True)["return"]
                yield _Member(name, returned, found.key, is_field=False)


def _key_of(hint: Any) -> Key:
    keys = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Key)]
    return keys[0] if keys else Key()


def _in_order(members: Sequence[_Member]) -> list[_Member]:
    """As declared, except keys that must follow another key."""
    found = [each for each in members if not each.key.after]
    for each in members:
        if each.key.after:
            at = [other.name for other in found].index(each.key.after) + 1
            at += sum(other.key.after == each.key.after for other in found)
            found.insert(at, each)
    return found
