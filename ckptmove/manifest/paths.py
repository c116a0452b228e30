"""Paths of keys that lead to a value, and their spelling as dotted names."""

from __future__ import annotations

import re
from typing import Annotated

from ..display.plain import Key as JsonKey

Key = str | int | float | bool | bytes | None
Path = tuple[Key, ...]

#: The start of the spelling of keys that are not, or not only, strings.
_LIKE_A_SCALAR = re.compile(r"-?\d|b['\"]|(None|True|False|-?inf|nan)$")


def spell(path: Path) -> str:
    """Return a path as a dotted name; that of the root is `(root)`.

    Keys are not quoted, so two paths may have one name: see `spell_apart`.
    """
    return ".".join([k if type(k) is str else _spell_key(k) for k in path]) if path else "(root)"


def spell_apart(path: Path) -> str:
    """Return a path as a unique dotted name: `("a.b", 0, "0")` is `"a.b".0."0"`."""
    return ".".join(map(_spell_quoted, path)) if path else "(root)"


def _spell_key(key: Key) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, int) and key.bit_length() > 1024:
        return hex(key)  # decimal takes quadratic time, and Python refuses it
    return str(key)


def _spell_quoted(key: Key) -> str:
    text = _spell_key(key)
    if not isinstance(key, str):
        return f"({text})" if "." in text else text
    plain = text and not any(c in text for c in '."()\\') and not _LIKE_A_SCALAR.match(text)
    if plain:
        return text
    import json  # imported only here: most names do not need it

    return json.dumps(text, ensure_ascii=False)


def path_json(path: Path) -> list[Key]:
    """Return a path in a form for JSON."""
    return [key if type(key) is str or _is_plain(key) else _spell_key(key) for key in path]


def _is_plain(key: Key) -> bool:
    return isinstance(key, str) or (isinstance(key, int) and key.bit_length() <= 1024)


#: A path that is shown in JSON.
PlainPath = Annotated[Path, JsonKey(plain=path_json, gives=list[str | int | bool])]
