"""Format numbers, names and errors for use in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_LISTED = 8
_LONGEST_NAME = 48  # bytes
_LONGEST = 300  # characters of an exception


def plural(n: int, what: str) -> str:
    """`1 key`, `2 keys`."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def class_name(value: object) -> str:
    """Return the class of a value with its article: `a dict`, `an int`."""
    name = type(value).__name__
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"


def join_names(names: Sequence[str], most: int = _MOST_LISTED) -> str:
    """`a, b and 12 more`."""
    more = len(names) - most
    shown = ", ".join(names[:most])
    return f"{shown} and {more:,} more" if more > 0 else shown


def quote(names: Sequence[str], most: int = 3) -> str:
    """`'a', 'b' and 12 more`."""
    return join_names([repr(name) for name in names[:most]] + list(names[most:]), most)


def few(names: Sequence[str], most: int = 3) -> str:
    """Return the first of some names from a file, short enough for one line."""
    return join_names([*map(short, names[:most]), *names[most:]], most)


def short(name: str) -> str:
    """Return a name from a file, short enough for a part of one line."""
    encoded = (name if name.isprintable() else ascii(name)).encode()
    if len(encoded) <= _LONGEST_NAME:
        return encoded.decode()
    return f"{encoded[:_LONGEST_NAME].decode(errors='ignore')}..."


def which_loading_runs(names: Sequence[str]) -> list[str]:
    """Yield a sentence about the unknown callables that a file names, if it does."""
    many = plural(len(names), "unknown callable")
    return [f"names {many}, which loading runs: {few(names)}"] if names else []


def first_line(error: BaseException, longest: int = 200) -> str:
    """Return the first line of another library's error; some are pages long."""
    said = text_of(error).strip().split("\n", 1)[0].strip() or type(error).__name__
    return said if len(said) <= longest else f"{said[:longest]}…"


def format_error(error: BaseException) -> str:
    """Return an exception in one line: its class and its first line."""
    lines = text_of(error).strip().splitlines()
    said = lines[0].strip() if lines else ""
    if len(said) > _LONGEST:
        said = f"{said[:_LONGEST]}..."
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def text_of(error: BaseException) -> str:
    """Return the text of an exception; empty if its own code fails."""
    try:
        return str(error)
    except Exception:
        return ""
