"""What a pattern of the user's speaks of.

It speaks of a name, and of all that is below it: `optimizer` of the whole optimizer, `model.*.bias`
of biases. `*` matches dots too. The name of a section (`model`, `optimizer`, …) speaks of that
section too, whatever it is called; `model` of one model alone, and of what is so called if that
holds weights. To select a section that is all there is, is to select everything.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from ..errors import RefusedError
from ..manifest.manifest import Section

_GLOB = frozenset("*?[")
_SECTIONS = frozenset(each.value for each in Section)


def covers(pattern: str, name: str) -> bool:
    """Whether a name is so called, or lies below one that is."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def unheard(pattern: str) -> RefusedError:
    """A pattern speaks of nothing."""
    return RefusedError(f"no name in it matches {pattern!r}", hint="ckptmove inspect lists names")


def is_name(pattern: str) -> bool:
    """Whether a pattern can only be the name of one thing, and of no section."""
    return pattern not in _SECTIONS and not _GLOB & {*pattern}
