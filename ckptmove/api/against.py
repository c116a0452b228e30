"""Check that a checkpoint equals another one or is a part of it, ignoring devices and casts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..display.phrases import join_names, plural
from ..errors import InputError, StrPath, UntrustedError
from ..graph.compare.side import LONGEST_TERM
from ..reports.difference import Difference, Kind
from ..reports.validate import FAILED, PASSED, SKIPPED, Finding
from ..sources import place_of
from ..writing.verify import Progress
from .diff import diff

_MOST_LISTED = 8  # differences
_LONGEST_EXCERPT = 160  # characters of the lines that differ
#: The kinds of differences that a part of a checkpoint may have from the whole.
_LEFT_OUT = (
    Kind.REMOVED,
    Kind.RENAMED,
    Kind.MOVED,
    Kind.VALUE_REMOVED,
    Kind.TYPE,
    Kind.ORDER,
    Kind.UNSHARED,
    Kind.RECORD_REMOVED,
)


def compare(
    path: str,
    against: StrPath | None,
    progress: Progress | None,
    *,
    subset: bool,
    ignore_code: bool,
    strict: bool,
    follow_links: bool,
) -> Finding:
    """Check whether `path` equals `against` or is a part of it, ignoring devices and casts."""
    if against is None:
        return Finding("against", SKIPPED, "nothing to compare it with was named")
    try:
        found = diff(
            against,
            path,
            ignore_devices=True,
            ignore_code=ignore_code,
            cast=True,
            strict=strict,
            follow_links=follow_links,
            progress=progress,
        )
    except UntrustedError:
        raise
    except InputError as error:
        if place_of(against).is_unreachable(error):
            raise
        hint = () if error.hint is None else (error.hint,)
        return Finding("against", FAILED, f"it can't be compared: {error}", hint)
    unlike = list(found.differences)
    if subset:
        moved = _moved_values(found.differences)
        unlike = [each for each in unlike if not _may_lack(each) and each.name not in moved]
    if subset and not found.tensors and found.of(Kind.REMOVED):
        title = f"none of the tensors of {found.a} is in it"
        return Finding("against", FAILED, title, (), found.to_json())
    if not unlike:
        casts = [f"{cast}: {count:,}" for cast, count in found.cast.items()]
        how = "equal to" if found.equal else "a part of"
        bits = "but for casts" if casts else "byte for byte"
        title = f"{how} {found.a}: {plural(found.tensors, 'tensor')}, {bits}"
        return Finding("against", PASSED, title, casts, found.to_json())
    title = f"differs from {found.a}"
    if all(each.kind is Kind.NOT_COMPARED for each in unlike):
        title = f"its tensors are those of {found.a}, but not all could be compared"
    return Finding("against", FAILED, title, _lines_of(unlike), found.to_json())


def _may_lack(difference: Difference) -> bool:
    """Whether a part of a checkpoint may differ from the whole in this way."""
    if difference.kind is Kind.NOT_COMPARED:
        return difference.new is None
    return difference.kind in _LEFT_OUT


def _moved_values(differences: Sequence[Difference]) -> set[str]:
    """Return the names of the added values that the whole has below the root of the part.

    The root is the prefix that the names of all renamed tensors lost. Only plain values count,
    because a difference holds other values only in shortened form.
    """
    roots = {
        each.old.removesuffix(each.new)
        for each in differences
        if each.kind is Kind.RENAMED and each.old.endswith(each.new)
    }
    if len(roots) != 1:
        return set()
    root = roots.pop()
    counts = Counter(each.name for each in differences)
    left_out = {
        each.name: each.old
        for each in differences
        if each.kind is Kind.VALUE_REMOVED and counts[each.name] == 1 and _is_whole(each.old)
    }
    return {
        each.name
        for each in differences
        if each.kind is Kind.VALUE_ADDED
        and counts[each.name] == 1
        and root + each.name in left_out
        and type(left_out[root + each.name]) is type(each.new)
        and left_out[root + each.name] == each.new
    }


def _is_whole(value: object) -> bool:
    """Whether a difference holds a value completely, not shortened."""
    if isinstance(value, str):
        return len(value) <= LONGEST_TERM
    return isinstance(value, (bool, int, float))


def _lines_of(differences: Sequence[Difference]) -> list[str]:
    lines = [_line(each) for each in differences[:_MOST_LISTED]]
    more = len(differences) - len(lines)
    return [*lines, f"and {more:,} more"] if more else lines


def _line(difference: Difference) -> str:
    """Say what differs, and also how, if that takes few words."""
    start = f"{difference.name}: {difference.kind}"
    if difference.lines:
        return f"{start}; {' '.join(difference.lines)[:_LONGEST_EXCERPT]}"
    values, old, new = difference.values, difference.old, difference.new
    if values is not None:
        by = "" if values.max_abs is None else f", by at most {values.max_abs:.3g}"
        first = f"the first, {list(values.first)}, is {values.new} and was {values.old}"
        return f"{start} in {values.differing:,} of {plural(values.of, 'element')}{by}; {first}"
    if difference.names:
        return f"{start}: {join_names(difference.names)}"
    if all(isinstance(each, (bool, int, float)) for each in (old, new)):
        return f"{start}: {old} → {new}"
    if difference.kind in (Kind.RESHAPED, Kind.RETYPED, Kind.MOVED, Kind.RENAMED):
        return f"{start}: {old} → {new}"
    return start
