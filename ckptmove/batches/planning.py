"""Plan a batch: everything that will be done, and the obstacles."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

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


class _Trees(NamedTuple):
    """The tree to read, the tree to write, and what earlier runs recorded there."""

    verb: str
    source: str
    destination: str | None
    root: str | None  #: the folder of the outputs; None if there are none
    is_gone: bool  #: whether there is nothing at the source
    options: Mapping[str, Any]
    request: str  #: as `request_of`
    ledger: Ledger | None
    wanted: ItemFilter
    output_of: Callable[[Item], str]

    @property
    def in_place(self) -> bool:
        """Whether the files of the source are changed."""
        return bool(self.options.get("in_place"))


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
    source, destination = os.fspath(src), None if dst is None else os.fspath(dst)
    options = resolve_options(verb, dst, options)
    if delete_source:
        check_removal(verb, options)
    if options.get("in_place") and not place_of(source).changes_in_place:
        why = "is in an object store, where files cannot be changed in place"
        raise RefusedError(why, path=source)
    if copy_rest and (dst is None or verb in ("inspect", "validate")):
        raise UsageError("--copy-rest needs a destination")
    trees = _open_trees(verb, source, destination, wanted, options, keep_suffix=keep_suffix)
    removed = _removed(trees)
    found = _discover(trees, removed)
    is_empty = not (found.items or found.unopened or (copy_rest and found.others))
    if is_empty:
        _accept_nothing(trees, found, removed, allow_empty=allow_empty)
    copied = _files_to_copy(trees, found, copy_rest=copy_rest)
    items = _with_outputs(trees, found, copied)
    asked = list(_tasks(trees, items, verify=verify, timeout=timeout))
    redo = delete_source and not dry_run  # finished sources must be removed
    done = [] if redo else _done(trees, asked)
    tasks = _tasks_to_do(trees, found, items, asked, {each.name for each in done})
    tasks = [
        each if each.clash else each._replace(delete_source=delete_source, digests=digests)
        for each in tasks
    ]
    kept = _kept(trees, items) if digests and not dry_run else []
    free = None if destination is None else tree_at(destination).free_nbytes()
    if destination is not None and verb != "validate":
        _check_outputs_fit(source, destination, tasks, free, output_nbytes)
    if destination is not None and not dry_run:
        found.notes += _prepare(destination, [*(task.item for task in tasks), *done])
    return BatchPlan(
        verb,
        source,
        trees.root,
        tasks=tuple(tasks),
        done=tuple(done),
        kept=tuple(kept),
        others=len(found.others) - len(copied),
        nbytes=sum(task.item.nbytes for task in tasks),
        free_nbytes=free,
        notes=tuple(found.notes),
        allows_empty=allow_empty or (is_empty and bool(removed)),
    )


def _open_trees(
    verb: str,
    source: str,
    destination: str | None,
    wanted: ItemFilter,
    options: Mapping[str, Any],
    *,
    keep_suffix: bool,
) -> _Trees:
    """Look at both trees, and open the ledger of earlier runs."""
    tree_at(source).remember()
    is_gone = not place_of(source).is_folder()
    if is_gone and place_of(source).exists():
        hint = f"ckptmove {verb} takes a single checkpoint"
        raise InputError("is not a directory", path=source, hint=hint)
    if destination is not None:
        check_apart(source, destination)
        tree_at(destination).check_root()
        tree_at(destination).remember()
    root = source if destination is None and options.get("in_place") else destination
    return _Trees(
        verb,
        source,
        destination,
        root,
        is_gone,
        options,
        request=request_of(verb, options),
        ledger=None if root is None else tree_at(root).open_ledger(),
        wanted=wanted,
        output_of=output_namer(verb, root, options, keep_suffix=keep_suffix),
    )


def _discover(trees: _Trees, removed: Collection[object]) -> Discovery:
    """Find the items: those of the source, and those that are only in the tree to compare with."""
    source, wanted = trees.source, trees.wanted
    if trees.is_gone and not removed and place_of(source).opens_by_path:
        raise InputError("there is no such directory", path=source)
    found = Discovery()
    if not trees.is_gone:
        found = discover(source, wanted, whole=trees.verb != "relocate", finished=_finished(trees))
    if "against" in trees.options:
        against = str(trees.options["against"])
        tree_at(against).remember()
        found.items += _missing(source, against, wanted)
    if trees.in_place:
        found.items = dedupe_hard_links(found.items, found.notes)
    return found


def _accept_nothing(
    trees: _Trees,
    found: Discovery,
    removed: Sequence[tuple[LedgerEntry, str]],
    *,
    allow_empty: bool,
) -> None:
    """Note that earlier runs removed all sources; raises RefusedError if there were none."""
    if removed:
        _check_unchanged(removed)
        many = plural(len(removed), "source")
        found.notes.append(f"nothing is left to do: earlier runs removed {many}")
    elif not allow_empty:
        more = f"; {plural(len(found.others), 'other file')} left out" if found.others else ""
        why = "there is nothing below it" if trees.is_gone else f"no checkpoint was found{more}"
        raise RefusedError(why, path=trees.source, hint="--allow-empty accepts that")


def _files_to_copy(trees: _Trees, found: Discovery, *, copy_rest: bool) -> list[Item]:
    """Return the other files that are copied: all, or those that belong to what is written."""
    if copy_rest:
        return found.others
    if trees.in_place or trees.verb not in ("relocate", "convert"):
        return []
    indices = trees.verb == "relocate"  # the index lists the files under these names
    return [
        each
        for each in found.others
        if (indices and each.kind == "index") or each.name in found.companions
    ]


def _with_outputs(trees: _Trees, found: Discovery, copied: Iterable[Item]) -> list[Item]:
    """Return everything to write, with the paths of the outputs."""
    root = place_of(trees.root or "")
    return [
        *(item._replace(output=trees.output_of(item)) for item in found.items),
        *(item._replace(output=root.child(item.name).path) for item in copied),
    ]


def _done(trees: _Trees, asked: Sequence[Task]) -> list[Item]:
    """Return the items that earlier runs finished, with the digests in the ledger."""
    finished = tree_at(trees.root or "").map_items(_is_done, asked)
    return [
        task.item._replace(digests=task.known.digests, source_digests=task.known.source_digests)
        for task, is_finished in zip(asked, finished, strict=True)
        if is_finished and task.known is not None
    ]


def _tasks_to_do(
    trees: _Trees,
    found: Discovery,
    items: Sequence[Item],
    asked: Iterable[Task],
    done: Collection[str],
) -> list[Task]:
    """Return the tasks that are not done, largest first, each with what is in its way."""
    clash = dict[str, str]()
    if trees.destination is not None:
        unopened = [item._replace(output=trees.output_of(item)) for item in found.unopened]
        is_wanted = partial(is_item, wanted=trees.wanted)
        clash = {
            name: f"would have the same name in the destination as {other}"
            for name, other in clashes(
                items, unopened, is_wanted, tree_at(trees.destination).file_of()
            ).items()
        }
    tasks = [
        task._replace(clash=clash.get(task.item.name, ""))
        for task in asked
        if task.item.name not in done
    ]
    tasks.sort(key=lambda task: (-task.item.nbytes, task.item.name))
    if trees.root is None:
        return tasks
    in_the_way = _obstacles(task.item.output for task in tasks)
    found_there = tree_at(trees.root).map_items(_there, tasks)
    return [
        task._replace(obstacle=task.clash or obstacle, existing=there)
        for task, obstacle, there in zip(tasks, in_the_way, found_there, strict=True)
    ]


def _kept(trees: _Trees, items: Iterable[Item]) -> list[Mapping[str, str]]:
    """Return the digests of unchanged outputs of earlier runs that this run does not write."""
    if trees.root is None or trees.ledger is None:
        return []
    outputs = _earlier_outputs(trees.ledger, trees, {item.name for item in items})
    there = zip(outputs, tree_at(trees.root).map_items(_is_as_written, outputs), strict=True)
    return [named_in(trees.root, path, entry.digests) for (entry, path), same in there if same]


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
    ledger: Ledger, trees: _Trees, items: Collection[str]
) -> list[tuple[LedgerEntry, str]]:
    """Return finished items in the share outside this run, with the paths of their outputs."""
    found = list[tuple[LedgerEntry, str]]()
    root = place_of(trees.root or "")
    for entry in ledger.every():
        name = entry.name
        if entry.outcome != "done" or name in items or not trees.wanted.is_in_share(name):
            continue
        if any(part in ("", ".", "..") for part in name.split("/")):  # not our ledger
            continue
        item = Item(name, "", entry.kind, (), 0)
        path = root.child(name).path if entry.kind == "other" else trees.output_of(item)
        found.append((entry, path))
    return found


def _removed(trees: _Trees) -> list[tuple[LedgerEntry, str]]:
    """Return wanted items whose sources earlier runs removed, with the paths of their outputs."""
    if trees.ledger is None:
        return []
    wanted = trees.wanted
    return [
        (entry, path)
        for entry, path in _earlier_outputs(trees.ledger, trees, ())
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
    trees: _Trees, items: Iterable[Item], *, verify: bool, timeout: float | None
) -> Iterator[Task]:
    """Yield the task of each item, with what the ledger knows of it."""
    options, ledger = trees.options, trees.ledger
    against = ReferenceTree(str(options["against"])) if "against" in options else None
    for item in items:
        task = Task(item, trees.verb, options, trees.request, verify=verify, timeout=timeout)
        if against is not None:
            path = against.of(item.name)
            task = task._replace(
                options={**options, "against": path}, reference=against.stamp_of(path)
            )
        if ledger is not None:
            known = ledger.entry(item.name)
            task = task._replace(ledger=ledger.path, known=known, since=ledger.nbytes)
        yield task


def _finished(trees: _Trees) -> Callable[[str, str], LedgerEntry | None]:
    """Return a function from the name and stamp of a file to its entry, if it is up to date."""
    ledger = trees.ledger

    def finished(name: str, stamp: str) -> LedgerEntry | None:
        known = None if ledger is None or not stamp else ledger.entry(name)
        if known is None or known.outcome != "done" or not known.kind:
            return None
        task = Task(Item(name, "", known.kind, (), 0), trees.verb, trees.options, trees.request)
        return known if key_of(task, stamp) == known.key else None

    if trees.in_place or "against" in trees.options:
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
