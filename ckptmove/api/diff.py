"""Implements `ckptmove.diff`: compare two checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack
from functools import partial
from math import isfinite
from typing import Annotated

from .. import formats
from ..display.phrases import plural
from ..errors import RefusedError, StrPath, UnsupportedError, UsageError
from ..formats.checkpoint import Checkpoint
from ..formats.folders.model_folder import checkpoints_beside
from ..formats.writing import FOLDER
from ..graph.compare.difference import ComparedTensor, Extent, SharedBytes, can_cast, unlike
from ..graph.compare.other_content import Beside, compare_beside, compare_records, is_code
from ..graph.compare.pairing import Pairing, pair
from ..graph.draft import CheckpointGraph
from ..graph.edit.numpy_arrays import tensors_for_arrays
from ..graph.edit.select import named_by
from ..graph.patterns import is_name
from ..manifest.manifest import Role
from ..manifest.other_records import HeldRecord, OtherRecord, RecordKind
from ..manifest.paths import spell
from ..reports.diff import Diff
from ..reports.difference import Difference, Kind
from ..runtime.compare_tensors import Comparison
from ..runtime.matching import match_renamed
from ..sources import place_of
from ..sources.place import EntryKind, FolderEntry
from ..sources.source import Source
from ..writing.in_place import recover_if_interrupted
from ..writing.verify import Progress
from .options import FollowLinks, Option, Strict, declare_options
from .strict import refuse_unknown_around

_WITHOUT_STRICT = "without --strict it is compared all the same"


@declare_options
@formats.pause_collection()
def diff(
    a: StrPath,
    b: StrPath,
    *,
    select: Annotated[
        str | Iterable[str],
        Option(
            "Compare only entries whose name matches GLOB, and everything below them.",
            "GLOB",
            "Comparison",
        ),
    ] = (),
    atol: Annotated[
        float,
        Option(
            "Accept floating-point values that differ by at most X; two NaNs are then equal too.",
            "X",
        ),
    ] = 0.0,
    rtol: Annotated[
        float,
        Option(
            "Accept floating-point values that differ by at most X times the value in A, in "
            "addition to --atol.",
            "X",
        ),
    ] = 0.0,
    ignore_devices: Annotated[
        bool, Option("Accept other devices of tensors, of values and in code.")
    ] = False,
    ignore_code: Annotated[
        bool, Option("Accept other code and classes of programs, and what cannot be compared.")
    ] = False,
    cast: Annotated[
        bool, Option("Cast floating-point tensors of A to the dtype of B, then compare.")
    ] = False,
    strict: Strict = False,
    follow_links: FollowLinks = False,
    progress: Progress | None = None,
) -> Diff:
    """Compare two checkpoints of any formats; nothing in them is executed.

    Numbers are compared bit by bit, so equal NaNs are equal. Tensors are compared by their
    elements, wherever these lie in a storage; everything else is compared by its content.
    Checkpoints inside bytes are compared as checkpoints. Code and other files inside a checkpoint
    are compared too. An entry that only one of the two formats can hold counts as a difference: not
    compared.

    Args:
        a: the first checkpoint.
        b: the second checkpoint.
        progress: a function that is called with the number of bytes compared since the last call.

    Returns:
        All differences; `equal` says whether there are none.

    Raises:
        UsageError: a tolerance makes no sense.
        InputError: one of the files cannot be read, or is refused (`UntrustedError`).
        RefusedError: a glob matches nothing in either checkpoint.
    """
    started = time.monotonic()
    if not all(isfinite(each) and each >= 0 for each in (atol, rtol)):
        raise UsageError("a tolerance is a number from 0 on")
    patterns = (select,) if isinstance(select, str) else tuple(select)
    notes = [
        f"{os.fspath(path)}: {note}" for path in (a, b) for note in recover_if_interrupted(path)
    ]
    with ExitStack() as opened:

        def read(path: StrPath) -> Checkpoint:
            found = opened.enter_context(formats.open_checkpoint(path, follow_links=follow_links))
            if strict:
                refuse_unknown_around(
                    path, found, otherwise=_WITHOUT_STRICT, follow_links=follow_links
                )
            return found

        first = read(a)
        # only a program's graph depends on the other format; a graph takes less than what was read
        old = None if first.container.program else first.draft(nested=True)
        second = read(b)
        alike = first.format == second.format
        old = old or first.draft(nested=True, program=alike)
        new = second.draft(nested=True, program=alike)
        for path, other in ((a, new), (b, old)):
            # the record of the original folder is not content
            if FOLDER in other.metadata and place_of(path).is_folder():
                other.metadata = {k: text for k, text in other.metadata.items() if k != FOLDER}
        arrays = {(id(graph), key) for graph in (old, new) for key in tensors_for_arrays(graph)}
        chosen = _selected_names(old, new, patterns)
        nbytes = sum(source.own_nbytes for graph in (old, new) for source in graph.sources)
        with Comparison(nbytes, atol, rtol, progress) as comparison:
            findings = _Findings(comparison, cast, ignore_devices, arrays)
            pairs = findings.compare(old, new, chosen)
        if patterns and not (pairs.both or pairs.old or pairs.new):
            _check_selection(old, new, patterns, chosen or ())
        if chosen is None:
            findings.add(compare_beside(old, new, ignore_devices=ignore_devices))
            if place_of(a).is_folder() and place_of(b).is_folder():
                findings.add(_compare_other_files(first, second, follow_links))
            else:
                findings.differences += _not_compared(first, second)
        if ignore_code:
            findings.ignore(lambda each: is_code(each, old, new))
        for source in (*old.sources, *new.sources):
            source.check_unchanged()
    return findings.report(old, new, notes, time.monotonic() - started)


def _not_compared(old: Checkpoint, new: Checkpoint) -> Iterator[Difference]:
    """Yield the further checkpoints of a model folder, which a single file cannot hold."""
    for name in checkpoints_beside(old):
        yield Difference(Kind.NOT_COMPARED, name, old.format, None)
    for name in checkpoints_beside(new):
        yield Difference(Kind.NOT_COMPARED, name, None, new.format)


def _compare_other_files(old: Checkpoint, new: Checkpoint, follow_links: bool) -> Beside:
    """Compare the files beside two checkpoints in folders, such as code and settings."""
    with ExitStack() as mine, ExitStack() as others:
        return compare_records(
            _other_files(old, mine, follow_links), _other_files(new, others, follow_links)
        )


def _other_files(
    checkpoint: Checkpoint, opened: ExitStack, follow_links: bool
) -> dict[str, HeldRecord]:
    """Return the files below a folder that are not part of the checkpoint; at most one is open."""
    place = place_of(checkpoint.container.source.path)
    folder = place if place.is_folder() else place.parent
    read = {source.path.removeprefix(folder.path).strip("/") for source in checkpoint.sources}

    def content(entry: FolderEntry, _: bool) -> Source:
        if entry.kind is not EntryKind.FILE:
            raise UnsupportedError(f"is a {entry.kind.value}")
        file = folder.child(entry.name)
        if not follow_links:
            file.check_link(folder)
        opened.close()
        return opened.enter_context(file.open())

    found = dict[str, HeldRecord]()
    for entry in sorted(folder.files_below()):
        if entry.kind is not EntryKind.FOLDER and entry.name not in read:
            kind = RecordKind.CODE if entry.name.endswith(".py") else RecordKind.DATA
            about = OtherRecord(entry.name, kind, entry.nbytes)
            found[entry.name] = HeldRecord(about, partial(content, entry))
    return found


def _selected_names(
    old: CheckpointGraph, new: CheckpointGraph, patterns: Sequence[str]
) -> set[str] | None:
    """Return the names to compare, or None for all."""
    if not patterns:
        return None
    names: list[set[str]] = []
    missing: list[set[str]] = []
    for draft in (old, new):
        graph = draft.graph
        found, missed = named_by(graph.root, graph.recogniser, patterns, draft.list_contents())
        names.append(found)
        missing.append(set(missed))
    for text in patterns:
        if all(text in missed for missed in missing):
            raise RefusedError(
                f"nothing in either is called {text!r}", hint="ckptmove inspect lists names"
            )
    both = names[0] | names[1]
    return both if "" in names[0] and "" in names[1] else both - {""}


def _check_selection(
    old: CheckpointGraph, new: CheckpointGraph, patterns: Sequence[str], chosen: Collection[str]
) -> None:
    """Raises RefusedError if no tensor or array is selected, unless all patterns are names."""
    listed = [draft.list_contents().tensors for draft in (old, new)]
    if any(e.role is Role.ARRAY and e.name in chosen for found in listed for e in found):
        return  # arrays are compared as values
    many = max(map(len, listed))
    if many and not all(map(is_name, patterns)):
        raise RefusedError(
            f"none of the {plural(many, 'tensor')} is selected: no tensors compared",
            hint="ckptmove inspect lists names",
        )


class _Findings:
    """Collects the results of a comparison."""

    def __init__(
        self,
        comparison: Comparison,
        cast: bool,
        ignore_devices: bool,
        arrays: Collection[tuple[int, str | None]],
    ) -> None:
        self.comparison = comparison
        self.may_cast = cast
        self.ignore_devices = ignore_devices
        self.arrays = arrays  # the storages that stand for arrays, each with its graph
        self.differences: list[Difference] = []
        self.cast: dict[str, int] = {}
        self.tensors = self.nbytes = self.close = self.devices_ignored = 0
        self.counted: set[Extent] = set()
        self.shared = SharedBytes()
        self.ignored: list[Difference] = []
        self.records = 0
        self.places: dict[int, dict[tuple[str, int], str]] = {}

    def add(self, beside: Beside) -> None:
        """Add the differences found in other records."""
        self.differences += beside.differences
        self.records += beside.compared
        self.devices_ignored += beside.devices

    def ignore(self, is_ignored: Callable[[Difference], bool]) -> None:
        """Move the differences to ignore from `differences` to `ignored`."""
        self.ignored += [each for each in self.differences if is_ignored(each)]
        self.differences = [each for each in self.differences if not is_ignored(each)]

    def compare(
        self, old: CheckpointGraph, new: CheckpointGraph, chosen: Set[str] | None
    ) -> Pairing:
        """Compare two checkpoints in one walk; then find the tensors that were only renamed."""
        pairs = pair(
            old,
            new,
            self.compare_values,
            chosen=chosen,
            ignore_devices=self.ignore_devices,
            cast=self.may_cast,
        )
        self.differences = pairs.differences + self.differences
        self.devices_ignored += pairs.passed
        matched = list(match_renamed(pairs.old, pairs.new, self.comparison, cast=self.may_cast))
        for mine, other in matched:
            self.add_renamed(mine, other)
        self.differences += self.shared.differences()
        matched_ids = {id(held) for both in matched for held in both}
        for kind, tensors in ((Kind.REMOVED, pairs.old), (Kind.ADDED, pairs.new)):
            for held in tensors:
                if id(held) not in matched_ids:
                    self.add_single(kind, held)
        return pairs

    def compare_values(self, old: ComparedTensor, new: ComparedTensor) -> None:
        """Compare the bytes of two tensors of the same name."""
        again = not self.count(old, new)
        dtypes = old.tensor.dtype, new.tensor.dtype
        if self.arrays:
            is_array = [(id(each.draft), each.tensor.storage) in self.arrays for each in (old, new)]
            if is_array[0] != is_array[1]:
                mine, other = ("numpy array" if each else "tensor" for each in is_array)
                self.differences.append(Difference(Kind.TYPE, old.name, mine, other))
        if old.is_left_out != new.is_left_out:
            mine, other = ("no bytes" if each.is_left_out else "bytes" for each in (old, new))
            self.differences.append(Difference(Kind.TYPE, old.name, mine, other))
        if old.shown is None or new.shown is None or old.tensor.shape != new.tensor.shape:
            return
        if dtypes[0] != dtypes[1]:
            if not (self.may_cast and can_cast(*dtypes)):
                return
            self.note_cast(*dtypes)
        found = self.comparison.compare(old.shown, new.shown, again=again)
        if found.values is not None:
            self.differences.append(
                Difference(Kind.CHANGED, old.name, *dtypes, values=found.values)
            )
        elif found.close:
            self.close += 1

    def add_renamed(self, old: ComparedTensor, new: ComparedTensor) -> None:
        """Add two tensors with equal bytes in different places, usually with different names."""
        self.count(old, new)
        names = old.name, new.name
        if names[0] == names[1]:  # the state dict and the whole module use the same name
            names = self.place(old), self.place(new)
        self.differences.append(Difference(Kind.RENAMED, names[0], *names))
        for kind, mine, other in unlike(old, new):
            if kind is Kind.MOVED and self.ignore_devices:
                self.devices_ignored += 1
            elif kind is Kind.RETYPED:
                self.note_cast(mine, other)
            else:
                name = f"{old.name}.requires_grad" if kind is Kind.VALUE else old.name
                self.differences.append(Difference(kind, name, mine, other))

    def place(self, held: ComparedTensor) -> str:
        """Return the place of a tensor, spelled with all keys that lead to it."""
        if id(held.draft) not in self.places:
            listed = held.draft.list_contents()
            self.places[id(held.draft)] = {
                (entry.name, id(node)): spell(entry.path)
                for entry, node in zip(listed.tensors, listed.nodes, strict=True)
            }
        return self.places[id(held.draft)].get((held.name, id(held.node)), held.name)

    def add_single(self, kind: Kind, held: ComparedTensor) -> None:
        """Add a tensor that only one of the checkpoints has."""
        what = {"dtype": held.tensor.dtype, "shape": list(held.tensor.shape)}
        pair = (what, None) if kind is Kind.REMOVED else (None, what)
        self.differences.append(Difference(kind, held.name, *pair))

    def report(
        self, old: CheckpointGraph, new: CheckpointGraph, notes: Sequence[str], seconds: float
    ) -> Diff:
        """Return the report of the comparison."""
        return Diff(
            a=old.path,
            b=new.path,
            a_format=old.format,
            b_format=new.format,
            tensors=self.tensors,
            nbytes=self.nbytes,
            differences=_by_kind(self.differences),
            close=self.close,
            cast=self.cast,
            devices_ignored=self.devices_ignored,
            records=self.records,
            ignored=_by_kind(self.ignored),
            warnings=(*notes, *_warnings(old), *_warnings(new)),
            seconds=seconds,
        )

    def note_cast(self, old: str, new: str) -> None:
        """Count a tensor that was cast."""
        self.cast[f"{old}→{new}"] = self.cast.get(f"{old}→{new}", 0) + 1

    def count(self, old: ComparedTensor, new: ComparedTensor) -> bool:
        """Count a tensor that both have, and its bytes once; return whether they were counted."""
        self.tensors += 1
        extent = old.extent
        self.shared.add(old.where, extent, new.extent)
        if extent is None or old.shown is None or extent in self.counted:
            return False
        self.counted.add(extent)
        self.nbytes += old.tensor.nbytes
        return True


def _by_kind(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    return tuple(sorted(differences, key=lambda each: list(Kind).index(each.kind)))


def _warnings(draft: CheckpointGraph) -> list[str]:
    return [f"{draft.path}: {text}" for text in draft.warnings]
