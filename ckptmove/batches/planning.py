"""Plan a batch: everything that will be done, and the obstacles."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..api.folders.files import check_apart
from ..display.phrases import plural
from ..errors import InputError, RefusedError, StrPath, UnsupportedError, UsageError
from ..reports.batch.items import MISSING, Item, LedgerEntry, Task
from ..reports.batch.report import BatchPlan
from ..sources import place_of
from ..sources.place import folders_above
from ..system.files import shares_blocks
from ..writing.final_name import NO_ROOM, failure_of
from .discovery import Discovery, dedupe_hard_links, discover, is_item
from .fingerprints import is_done, is_ours, key_of, request_of
from .options import ReferenceTree, resolve_options
from .outputs import clashes, named_in, output_namer
from .run_item import output_nbytes
from .selection import ItemFilter
from .source_removal import check_removal
from .trees import Ledger, tree_at
from .trees.local_tree import existing_parent


def plan_batch(
    verb: str,
    src: StrPath,
    dst: StrPath | None,
    *,
    wanted: ItemFilter,
    copy_rest: bool,
    keep_suffix: bool,
    digests: bool,
    delete_source: bool,
    timeout: float | None,
    allow_empty: bool,
    verify: bool,
    dry_run: bool,
    options: Mapping[str, Any],
) -> BatchPlan:
    """Plan what `batch` does; the arguments are its own.

    Unless it is a dry run, leftovers of killed runs are removed, and the destination is made.
    """
    source = os.fspath(src)
    options = resolve_options(verb, dst, options)
    in_place = bool(options.get("in_place"))
    if delete_source:
        check_removal(verb, options)
    if in_place and not place_of(source).changes_in_place:
        raise RefusedError(
            "is in an object store, where files cannot be changed in place", path=source
        )
    if copy_rest and (dst is None or verb in ("inspect", "validate")):
        raise UsageError("--copy-rest needs a destination")
    tree_at(source).remember()
    is_gone = not place_of(source).is_folder()
    if is_gone and place_of(source).exists():
        hint = f"ckptmove {verb} takes a single checkpoint"
        raise InputError("is not a directory", path=source, hint=hint)
    if dst is not None:
        check_apart(source, os.fspath(dst))
        tree_at(os.fspath(dst)).check_root()
    root = os.fspath(dst) if dst is not None else source if in_place else None
    moves = verb == "relocate"
    request = request_of(verb, options)
    if dst is not None:
        tree_at(os.fspath(dst)).remember()
    ledger = None if root is None else tree_at(root).open_ledger()
    named = output_namer(verb, root, options, keep_suffix=keep_suffix)
    removed = [] if ledger is None or root is None else _removed(ledger, wanted, root, named)
    if is_gone and not removed and place_of(source).opens_by_path:
        raise InputError("there is no such directory", path=source)
    found = (
        Discovery()
        if is_gone
        else discover(
            source,
            wanted,
            whole=not moves,
            finished=_finished(verb, options, request, ledger),
        )
    )
    if "against" in options:
        tree_at(str(options["against"])).remember()
        found.items += _missing(source, str(options["against"]), wanted)
    is_empty = not (found.items or found.unopened or (copy_rest and found.others))
    if is_empty and removed:
        _check_unchanged(removed)
        many = plural(len(removed), "source")
        found.notes.append(f"nothing is left to do: earlier runs removed {many}")
    elif is_empty and not allow_empty:
        more = f"; {plural(len(found.others), 'other file')} left out" if found.others else ""
        why = "there is nothing below it" if is_gone else f"no checkpoint was found{more}"
        raise RefusedError(why, path=source, hint="--allow-empty accepts that")
    if in_place:
        found.items = dedupe_hard_links(found.items, found.notes)
    indices = verb == "relocate" and not in_place  # the index lists the files under these names
    copied = [
        each
        for each in found.others
        if copy_rest
        or (indices and each.kind == "index")
        or (verb in ("relocate", "convert") and not in_place and each.name in found.companions)
    ]
    left = len(found.others) - len(copied)
    items = [item._replace(output=named(item)) for item in found.items]
    items += [item._replace(output=place_of(root or "").child(item.name).path) for item in copied]
    clash = dict[str, str]()
    if dst is not None:
        unopened = [item._replace(output=named(item)) for item in found.unopened]
        clash = clashes(
            items, unopened, partial(is_item, wanted=wanted), tree_at(os.fspath(dst)).file_of()
        )
    tasks, done = list[Task](), list[Item]()
    tree = tree_at(root or "")
    asked = list(_tasks(verb, items, ledger, options, request, verify=verify, timeout=timeout))
    for task, finished in zip(asked, tree.map_items(_is_done, asked), strict=True):
        if finished and not (delete_source and not dry_run):  # finished sources must be removed
            known = task.known
            assert known is not None, "it says what is done"
            about = task.item._replace(digests=known.digests, source_digests=known.source_digests)
            done.append(about)
        elif task.item.name in clash:
            other = clash[task.item.name]
            why = f"would have the same name in the destination as {other}"
            tasks.append(task._replace(clash=why))
        else:
            tasks.append(task._replace(delete_source=delete_source, digests=digests))
    tasks.sort(key=lambda task: (-task.item.nbytes, task.item.name))
    if root is not None:
        in_the_way = _obstacles(task.item.output for task in tasks)
        found_there = tree.map_items(_there, tasks)
        tasks = [
            task._replace(obstacle=task.clash or obstacle, existing=there)
            for task, obstacle, there in zip(tasks, in_the_way, found_there, strict=True)
        ]
    free, kept = None, list[Mapping[str, str]]()
    if digests and not dry_run and root is not None and ledger is not None:
        outputs = _earlier_outputs(ledger, wanted, root, named, {item.name for item in items})
        there = zip(outputs, tree.map_items(_is_as_written, outputs), strict=True)
        kept = [named_in(root, path, entry.digests) for (entry, path), same in there if same]
    if dst is not None:
        free = tree_at(os.fspath(dst)).free_nbytes()
        if verb != "validate":
            _check_outputs_fit(source, os.fspath(dst), tasks, free, output_nbytes)
        if not dry_run:
            found.notes += _prepare(os.fspath(dst), [*(task.item for task in tasks), *done])
    nbytes = sum(task.item.nbytes for task in tasks)
    return BatchPlan(
        *(verb, source, root, tuple(tasks), tuple(done), tuple(kept)),
        *(left, nbytes, free, tuple(found.notes)),
        allows_empty=allow_empty or (is_empty and bool(removed)),
    )


def _missing(source: str, against: str, wanted: ItemFilter) -> list[Item]:
    """Return checkpoints of the other tree that have no counterpart in this one."""
    names = {each.name for each in tree_at(source).files()}
    names |= {above for name in names for above in folders_above(name)}
    references = ReferenceTree(against)
    compared = {references.of(name) for name in names}
    with contextlib.suppress(InputError):
        if compared.issuperset(each.path for each in tree_at(against).files()):
            return []
    try:
        others = discover(against, wanted, whole=True).items
    except UnsupportedError:  # it is one checkpoint; every item is compared with it
        return []
    return [
        item._replace(kind=MISSING, files=(), nbytes=0, stamp="")
        for item in others
        if compared.isdisjoint((item.path, *item.files))
    ]


def _earlier_outputs(
    ledger: Ledger,
    wanted: ItemFilter,
    root: str,
    named: Callable[[Item], str],
    items: Collection[str],
) -> list[tuple[LedgerEntry, str]]:
    """Return finished items in the share outside this run, with the paths of their outputs."""
    found = list[tuple[LedgerEntry, str]]()
    for entry in ledger.every():
        name = entry.name
        if entry.outcome != "done" or name in items or not wanted.is_in_share(name):
            continue
        if any(part in ("", ".", "..") for part in name.split("/")):  # not our ledger
            continue
        item = Item(name, "", entry.kind, (), 0)
        path = place_of(root).child(name).path if entry.kind == "other" else named(item)
        found.append((entry, path))
    return found


def _removed(
    ledger: Ledger, wanted: ItemFilter, root: str, named: Callable[[Item], str]
) -> list[tuple[LedgerEntry, str]]:
    """Return wanted items whose sources earlier runs removed, with the paths of their outputs."""
    return [
        (entry, path)
        for entry, path in _earlier_outputs(ledger, wanted, root, named, ())
        if entry.removed and wanted.includes(entry.name) and not wanted.excludes(entry.name)
    ]


def _check_unchanged(outputs: Iterable[tuple[LedgerEntry, str]]) -> None:
    """Raises RefusedError if outputs, whose sources were removed, are not as they were written."""
    changed = [made for made in outputs if not _is_as_written(made)]
    if changed:
        more = f"; so are {len(changed) - 1:,} more" if len(changed) > 1 else ""
        raise RefusedError(
            f"is not as an earlier run wrote it, which then removed its source{more}",
            path=changed[0][1],
        )


def _is_as_written(made: tuple[LedgerEntry, str]) -> bool:
    """Whether an output still matches the ledger, judged without reading it."""
    entry, path = made
    try:
        return tree_at(path).output(summed=False).stamp == entry.stamp
    except (OSError, InputError, RefusedError):
        return False


def _tasks(
    verb: str,
    items: Iterable[Item],
    ledger: Ledger | None,
    options: Mapping[str, Any],
    request: str,
    *,
    verify: bool,
    timeout: float | None,
) -> Iterator[Task]:
    against = ReferenceTree(str(options["against"])) if "against" in options else None
    for item in items:
        task = Task(item, verb, options, request, verify=verify, timeout=timeout)
        if against is not None:
            path = against.of(item.name)
            task = task._replace(
                options={**options, "against": path}, reference=against.stamp_of(path)
            )
        if ledger is not None:
            known = ledger.entry(item.name)
            task = task._replace(ledger=ledger.path, known=known, since=ledger.nbytes)
        yield task


def _finished(
    verb: str, options: Mapping[str, Any], request: str, ledger: Ledger | None
) -> Callable[[str, str], LedgerEntry | None]:
    """Return a function from the name and stamp of a file to its entry, if it is up to date."""

    def finished(name: str, stamp: str) -> LedgerEntry | None:
        known = None if ledger is None or not stamp else ledger.entry(name)
        if known is None or known.outcome != "done" or not known.kind:
            return None
        task = Task(Item(name, "", known.kind, (), 0), verb, options, request)
        return known if key_of(task, stamp) == known.key else None

    if options.get("in_place") or "against" in options:
        return lambda name, stamp: None
    return finished


def _is_done(task: Task) -> bool:
    known, stamp = task.known, task.item.stamp
    if known is None or (task.verify and not task.in_place) or not stamp:
        return False
    return is_done(known, task, key_of(task, stamp))


def _there(task: Task) -> str:
    """Return how an existing output is treated: `replaced`, `compared`, `checked`, or empty."""
    known, stamp, output = task.known, task.item.stamp, task.item.output
    try:
        if task.in_place or not tree_at(output).is_taken():
            return ""
        if task.verb == "validate" and is_ours(known, output):
            return "replaced"
    except (OSError, InputError):  # it can't be read
        return "compared"
    if known is not None and known.outcome == "done" and stamp and known.key == key_of(task, stamp):
        return "checked"
    return "replaced" if task.options.get("force") else "compared"


def _prepare(dst: str, items: Iterable[Item]) -> list[str]:
    """Make the destination, and remove leftovers of killed runs; return those that stay."""
    tree = tree_at(dst)
    try:
        tree.make_folder()
    except OSError as error:
        raise failure_of(error, dst) from error
    return tree.remove_leftovers(items)


def _obstacles(outputs: Iterable[str]) -> list[str]:
    """Return why outputs cannot be written; empty if no reason is known."""
    folders: dict[str, str] = {}
    found = list[str]()
    for output in outputs:
        folder = os.path.dirname(output)
        if folder not in folders:
            folders[folder] = tree_at(folder).obstacle()
        try:
            tree_at(output).check_name()
            found.append(folders[folder])
        except RefusedError as error:
            found.append(str(error))
    return found


def _check_outputs_fit(
    source: str, dst: str, tasks: Sequence[Task], free: int | None, written: Callable[[Task], int]
) -> None:
    """Raises RefusedError if the missing outputs do not fit into `free` bytes.

    `written` returns how much will be written for an item; it is called only if space may be short.
    """
    if free is None:
        return
    new = [task for task in tasks if not task.existing and not task.obstacle]
    if sum(task.item.nbytes for task in new) <= free or _shares_blocks(source, dst):
        return
    nbytes = sum(map(written, new))
    if nbytes > free:
        raise RefusedError(f"{NO_ROOM}: {nbytes:,} bytes are needed, {free:,} are free", path=dst)


def _shares_blocks(source: str, dst: str) -> bool:
    """Whether files of the two trees can share blocks; tried with unnamed files."""
    folder = existing_parent(dst)
    try:
        return os.stat(source).st_dev == os.stat(folder).st_dev and shares_blocks(folder)
    except OSError:
        return False
