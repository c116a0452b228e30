"""Plan a batch: everything that will be done, and what would be in the way, before anything is."""

from __future__ import annotations

import inspect as signatures
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, RefusedError, StrPath, UsageError
from ..rules import rules_of
from ..verbs.companions import check_apart
from ..verbs.convert import check_options, convert
from ..verbs.relocate import relocate
from ..verbs.validate import validate
from .finding import Wanted, find
from .items import SCHEMA, Item, Task
from .ledger import LEDGER, Entry, Ledger
from .naming import bare_name, is_in_share, naming, refuse_clashes, share_of
from .room import free_nbytes, prepare, shares_blocks
from .working import is_done, source_stamp

VERBS: Mapping[str, Callable[..., Any]] = {
    "relocate": relocate,
    "convert": convert,
    "validate": validate,
}
#: What may make a checkpoint smaller.
_SHRINKING = ("select", "exclude_tensors", "root", "preset", "dtype")
#: What the batch decides for each item, or has under another name.
_NOT_THEIRS = ("src", "dst", "progress", "dry_run")


@dataclass(frozen=True)
class BatchPlan:
    """What a batch is going to do.

    Attributes:
        verb: `relocate`, `convert` or `validate`.
        source: the tree.
        destination: where the other tree goes; None if nothing is written elsewhere.
        tasks: what there is to do, the biggest first.
        done: what is done already.
        others: how many files are left alone, since they are no checkpoints.
        nbytes: how much there is to read.
        free_nbytes: what is free in the destination, or None if nothing is written there.
        notes: what the user should know, a sentence each.
    """

    verb: str
    source: str
    destination: str | None
    tasks: tuple[Task, ...]
    done: tuple[Item, ...] = ()
    others: int = 0
    nbytes: int = 0
    free_nbytes: int | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain data, the same as `ckptmove batch … --dry-run --json` prints."""
        return {
            "schema": SCHEMA,
            "verb": self.verb,
            "source": self.source,
            "destination": self.destination,
            "items": [
                {
                    "name": task.item.name,
                    "kind": task.item.kind,
                    "nbytes": task.item.nbytes,
                    "destination": task.item.output or None,
                }
                for task in self.tasks
            ],
            "done": [item.name for item in self.done],
            "others": self.others,
            "nbytes": self.nbytes,
            "free_nbytes": self.free_nbytes,
            "notes": list(self.notes),
        }


def plan_batch(
    verb: str,
    src: StrPath,
    dst: StrPath | None,
    *,
    include: Iterable[str],
    exclude: Iterable[str],
    copy_others: bool,
    shard_of: str | None,
    verify: bool,
    dry_run: bool,
    options: Mapping[str, Any],
) -> BatchPlan:
    """Look through a tree, and decide what is to be done; the arguments are those of `batch`.

    Unless it is a dry run, what killed runs left over is removed, and the folders are made.

    Raises:
        UsageError: the request makes no sense.
        InputError: the tree can't be read.
        RefusedError: two items would become one, or there is no room.
    """
    source = os.fspath(src)
    options = checked_options(verb, dst, options)
    in_place = bool(options.get("in_place"))
    if copy_others and (dst is None or verb == "validate"):
        raise UsageError("other files are copied only where a new tree is written")
    shard = share_of(shard_of)
    if not os.path.isdir(source):
        raise InputError("is no directory", path=source, hint=f"ckptmove {verb}")
    root = os.fspath(dst) if dst is not None else source if in_place else None
    if dst is not None:
        check_apart(source, os.fspath(dst))
    wanted = Wanted(include, exclude)
    found = find(source, wanted, whole=verb != "relocate")
    items, others = found.items, found.others
    if verb == "relocate" and not in_place:  # an index stays that of its files
        copied = [each for each in others if copy_others or each.kind == "index"]
    else:
        copied = others if copy_others else []
    left = len(others) - len(copied)
    named = naming(verb, root, options)
    items = [item._replace(output=named(item)) for item in items]
    items += [item._replace(output=os.path.join(root or "", item.name)) for item in copied]
    refuse_clashes(items, in_place=in_place or root is None)
    items = [item for item in items if shard is None or is_in_share(item.name, *shard)]
    fingerprint = fingerprint_of(verb, options)
    ledger = Ledger(os.path.join(root, LEDGER)) if root is not None else None
    tasks, done = list[Task](), list[Item]()
    for item in items:
        own = _options_for(item, verb, source, options)
        task = Task(item, verb, own, fingerprint, ledger.path if ledger else "", root or "")
        known = ledger.of(item.name) if ledger else None
        if known is not None and _holds(known, task, verify=verify):
            done.append(item)
        else:
            tasks.append(task._replace(known=known, since=ledger.nbytes if ledger else 0))
    tasks.sort(key=lambda task: (-task.item.nbytes, task.item.name))
    nbytes = sum(task.item.nbytes for task in tasks)
    free = None
    if dst is not None:
        free = free_nbytes(os.fspath(dst))
        fits = nbytes <= free or verb == "validate" or any(options.get(each) for each in _SHRINKING)
        if not fits and not shares_blocks(source, os.fspath(dst)):
            raise RefusedError(
                f"there is no room: {nbytes:,} bytes are needed, {free:,} are free", path=root
            )
        if not dry_run:
            prepare(os.fspath(dst), [task.item for task in tasks], done)
    return BatchPlan(
        verb, source, root, tuple(tasks), tuple(done), left, nbytes, free, tuple(found.notes)
    )


def checked_options(verb: str, dst: StrPath | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a verb for all items, without those that say what holds anyway.

    Raises:
        UsageError: the verb has none of that name, or they make no sense.
    """
    if verb not in VERBS:
        raise UsageError(f"{verb!r} is no verb for a batch", hint=f"one of {', '.join(VERBS)}")
    known = dict(signatures.signature(VERBS[verb]).parameters)
    if verb == "convert":
        known["exclude_tensors"] = known.pop("exclude")
    for name in options:
        if name not in known or name in _NOT_THEIRS:
            raise UsageError(f"{verb} has no option {name!r} in a batch")
    given = {
        name: _plain(value)
        for name, value in options.items()
        if value is not None and value != known[name].default and value not in ((), [], {})
    }
    if verb == "relocate":
        found = rules_of(
            to=given.get("to"),
            map=given.get("map"),
            place=given.get("place"),
            device_map=given.get("device_map"),
        )
        if given.get("device_map") is not None:
            given["device_map"] = dict(found.device_map)
        if bool(given.get("in_place")) == (dst is not None):
            raise UsageError("either a destination is given, or in place")
    elif verb == "convert":
        if dst is None:
            raise UsageError("no destination is given")
        check_options(given)
    return given


def _plain(value: Any) -> Any:
    """What an option says, such that it can be sent elsewhere without what it was made of."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "torch":  # a device or a dtype, by its name
        return str(value).removeprefix("torch.")
    if not isinstance(value, (str, int, float)) and isinstance(value, Iterable):
        return tuple(_plain(each) for each in value)
    return value


def fingerprint_of(verb: str, options: Mapping[str, Any]) -> str:
    """A digest of what an output depends on besides its source."""
    import hashlib

    said = {name: value for name, value in options.items() if name != "force"}
    text = json.dumps([verb, said], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _options_for(
    item: Item, verb: str, source: str, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """What differs from item to item: with what it is to be compared."""
    if verb != "validate" or "against" not in options:
        return options
    path = os.path.join(str(options["against"]), item.name)
    if not os.path.lexists(path):
        folder, name = os.path.split(path)
        try:
            beside = sorted(os.listdir(folder))
        except OSError:
            beside = []
        alike = [each for each in beside if bare_name(each) == bare_name(name)]
        if len(alike) == 1:
            path = os.path.join(folder, alike[0])
    return {**options, "against": path}


def _holds(known: Entry, task: Task, *, verify: bool) -> bool:
    try:
        return is_done(known, task, source_stamp(task.item), verify=verify)
    except InputError:
        return False
