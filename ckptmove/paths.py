"""Paths: the keys that lead to a value, and how they are spelled as a dotted name."""

from __future__ import annotations

Key = str | int | float | bool | bytes | None
Path = tuple[Key, ...]


def spell(path: Path) -> str:
    """A path as a dotted name; that of the root is `(root)`."""
    return ".".join([k if type(k) is str else _spell_key(k) for k in path]) if path else "(root)"


def _spell_key(key: Key) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, int) and key.bit_length() > 1024:
        return hex(key)  # decimal takes quadratic time, and Python refuses it
    return str(key)


def path_json(path: Path) -> list[Key]:
    """A path as JSON can have it."""
    return [key if _is_plain(key) else _spell_key(key) for key in path]


def _is_plain(key: Key) -> bool:
    return isinstance(key, str) or (isinstance(key, int) and key.bit_length() <= 1024)
