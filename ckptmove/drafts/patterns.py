"""What a pattern of the user's speaks of.

It speaks of a name, and of all that is below it: `optimizer` of the whole optimizer, `model.*.bias`
of biases. `*` matches dots too. Where no name matches and the pattern is the name of a section
(`model`, `optimizer`, …), it speaks of that section, whatever it is called; and to select a section
that is all there is, is to select everything.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from ..errors import RefusedError


def covers(pattern: str, name: str) -> bool:
    """Whether a name is so called, or lies below one that is."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def unheard(pattern: str) -> RefusedError:
    """A pattern speaks of nothing."""
    return RefusedError(f"nothing in it is called {pattern!r}", hint="ckptmove inspect lists names")
