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


#: Letters that print as nothing: what Unicode says may be ignored, and the blank of Braille.
_BLANK = (
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U0001d159\U000e0000-\U000e0fff]"
)


def show_name(name: str) -> str:
    """Return a name from a file as text shows it: quoted if it would look like another name.

    So are an empty name, blanks at its ends, what does not print, letters that Unicode holds for
    others, and what looks like such a quoted name. No two names are shown alike.
    """
    if not _looks_like_another(name):
        return name
    import json  # imported only here and below: few names need it

    return json.dumps(name)


def _looks_like_another(name: str) -> bool:
    if not name or not name.isprintable() or "\\" in name or "  " in name:
        return True
    if name[0] == " " or name[-1] == " ":
        return True
    if not name.isascii():
        import re
        import unicodedata

        if not unicodedata.is_normalized("NFKC", name) or re.search(_BLANK, name):
            return True
    return name[0] == name[-1] == '"' and _looks_like_another(name[1:-1])


def join_names(names: Sequence[str], most: int = _MOST_LISTED) -> str:
    """`a, b and 12 more`."""
    return _join([*map(show_name, names[:most])], len(names) - most)


def _join(texts: Sequence[str], more: int) -> str:
    joined = ", ".join(texts)
    return f"{joined} and {more:,} more" if more > 0 else joined


def quote(names: Sequence[str], most: int = 3) -> str:
    """`'a', 'b' and 12 more`."""
    return _join([repr(name) for name in names[:most]], len(names) - most)


def few(names: Sequence[str], most: int = 3) -> str:
    """Return the first of some names from a file, short enough for one line."""
    return _join([*map(short, names[:most])], len(names) - most)


def short(name: str) -> str:
    """Return a name from a file, short enough for a part of one line."""
    encoded = show_name(name).encode()
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
