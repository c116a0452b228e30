"""Do one item with its verb, or find that it is already done."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..api.convert import convert
from ..api.folders.files import CONFIGURATION, Companion, all_files, check_apart, with_dtype
from ..api.inspect import WITHOUT_STRICT
from ..api.relocate import relocate
from ..api.strict import refuse_unknown, refuse_unknown_in
from ..api.validate import validate
from ..display.phrases import join_names
from ..errors import (
    CheckFailed,
    CkptmoveError,
    InputError,
    RefusedError,
    UnsupportedError,
    UntrustedError,
)
from ..formats.distributed.dcp.folder import Dcp
from ..formats.distributed.dcp.hf_shards import HuggingFaceShards
from ..formats.folders.training_folder import FolderCheckpoint
from ..formats.safetensors.file import SafetensorsFile
from ..graph.edit.cast import casts_of
from ..plans.plan import Copy, Plan, Write
from ..reports.batch.items import MISSING, UNREADABLE, Contents, Item, LedgerEntry, Task
from ..reports.convert import ConvertReport
from ..reports.relocate import RelocateReport
from ..sources import place_of
from ..writing import destination_of
from ..writing.final_name import EXISTS_HINT, NO_ROOM, before_commit
from ..writing.staged_file import naming_later
from .discovery import item_checkpoint
from .fingerprints import is_ours
from .messages import LISTENER
from .trees import tree_at
from .trees.local_tree import free_path_near

_COPIED_UNCHANGED = "without --strict it is copied unchanged"
_ANOTHER = "the destination exists and differs from what would be written"


class ItemOutcome(NamedTuple):
    """The outcome of a verb for one item."""

    report: Mapping[str, Any] | None  #: as plain data
    bytes_written: int  #: the bytes written
    copied: bool = False  #: whether the item is unchanged: copied, or left in place
    reason: str = ""  #: the fault found, in one line
    hint: str | None = None  #: how to fix it

    @property
    def ok(self) -> bool:
        """Whether the verb found no fault."""
        return not self.reason


def do_item(task: Task, known: LedgerEntry | None) -> ItemOutcome | None:
    """Do an item; `known` is its entry in the ledger. None if a correct output exists already.

    This finds finished items without an entry: their run was killed, or another process did them.
    """
    item, force = task.item, bool(task.options.get("force"))
    output = tree_at(item.output)
    if item.output and not task.in_place:
        output.check_name()
        tree_at(output.place.parent.path).make_folder()
    if task.verb == "inspect":
        return inspect_item(task)
    if task.verb == "validate":
        return _validated(task, known, force=force)
    if not task.in_place and not output_is_folder(task) and output.place.is_folder():
        raise RefusedError("the destination is a directory", path=item.output)
    if task.in_place or force or not output.is_taken():
        try:
            return _made(task, item.output, force=force)
        except RefusedError:
            if task.in_place or not output.is_taken():
                raise
            # another process made it meanwhile
    _refuse_other_sizes(task)
    with output.beside() as other, naming_later(None), before_commit(None):
        try:
            made = _made(task, other, force=False)
        except CkptmoveError as error:
            if error.path is not None and error.path.startswith(other):
                error.path = item.output
            raise
        if not output.same(tree_at(other)):
            raise other_error(task)
    return None if made.ok else made._replace(bytes_written=0)


def output_is_folder(task: Task) -> bool:
    """Whether the output is a folder."""
    if task.verb != "convert":
        return task.item.kind == "folder"
    divided = task.options.get("max_shard_size") is not None
    return task.item.kind == "folder" or (divided and task.item.kind != "other")


def output_nbytes(task: Task) -> int:
    """The least space that the output of an item takes; 0 if unknown."""
    item = task.item
    try:
        if task.verb == "convert" and item.kind != "other":
            there = free_path_near(item.output)  # the destination may not exist yet
            return sum(_converted(task, there, force=False, dry_run=True).files.values())
        return tree_at(item.path).copied_nbytes(item.nbytes)
    except RefusedError as error:  # this item alone is too large, or nothing will be written
        return item.nbytes if NO_ROOM in str(error) else 0
    except (CkptmoveError, OSError):
        return 0


def _refuse_other_sizes(task: Task) -> None:
    """Raises RefusedError if the size of the existing output shows that it differs."""
    if task.verb == "convert" and task.item.kind in ("file", "index", "folder"):
        output = task.item.output
        files = _converted(task, output, force=True, dry_run=True).files
        sizes = {each[len(output) :].lstrip("/"): nbytes for each, nbytes in files.items()}
        if sizes != tree_at(output).sizes():
            raise other_error(task)


def other_error(task: Task) -> RefusedError:
    """Return the error for an existing output that differs from the new one."""
    return RefusedError(_ANOTHER, path=task.item.output, hint=EXISTS_HINT)


def is_copied(task: Task) -> bool:
    """Whether the verb can't change anything in an item, so that it is copied."""
    kind = task.item.kind
    if task.verb == "relocate" and (kind == "index" or _stores_no_devices(task.item)):
        return True
    return kind == "other"


def check_copied(task: Task) -> None:
    """Raises CorruptError if an item to copy is a checkpoint whose metadata shows damage.

    With `strict`, raises UntrustedError as the verb does.
    """
    item, strict = task.item, bool(task.options.get("strict"))
    if item.kind in ("index", "other"):
        if strict:
            refuse_unknown_in(item.path, otherwise=_COPIED_UNCHANGED)
        return
    try:
        with item_checkpoint(item, follow_links=bool(task.options.get("follow_links"))) as found:
            if strict:
                refuse_unknown(found.manifest, otherwise=_COPIED_UNCHANGED)
    except UnsupportedError:  # what is not understood can be copied all the same
        if strict:
            raise


def _stores_no_devices(item: Item) -> bool:
    if item.kind == "folder":
        return item.format in (Dcp.name, HuggingFaceShards.name)
    return (item.kind, item.format) == ("file", SafetensorsFile.name)


def _made(task: Task, output: str, *, force: bool) -> ItemOutcome:
    """Run the verb, or copy a file that is not a checkpoint."""
    kind = task.item.kind
    refuse_unreadable(task.item)
    if is_copied(task):
        check_copied(task)
        if task.in_place:
            return ItemOutcome(None, 0, copied=True)
        if kind == "folder":
            return _folder_copied(task, output, force)
        return _copied(task, output, force)
    if task.verb == "relocate":
        return _relocated(task, output, force)
    return of_conversion(_converted(task, output, force=force))


def of_conversion(report: ConvertReport, bytes_written: int | None = None) -> ItemOutcome:
    """Return the outcome of a conversion; pickles left are faults, unless the user keeps them."""
    written = report.bytes_written if bytes_written is None else bytes_written
    wrong = report.failure
    if wrong is None:
        return ItemOutcome(report.to_json(), written)
    return ItemOutcome(report.to_json(), written, reason=str(wrong), hint=wrong.hint)


def _relocated(task: Task, output: str, force: bool) -> ItemOutcome:
    options = {**task.options, "allow_unmatched": True}
    if not task.in_place:
        options |= {"dst": output, "force": force}
    report = relocate(task.item.path, progress=LISTENER.get(), **options)
    return of_relocation(report, report.bytes_written)


def of_relocation(report: RelocateReport, bytes_written: int) -> ItemOutcome:
    """Return the outcome of a relocation; a folder without stored devices was copied."""
    copied = bool(report.files) and not any(each.stores_devices for each in report.files)
    if report.in_place:
        copied = report.method == "none"
    return ItemOutcome(report.to_json(), bytes_written, copied=copied)


def _converted(task: Task, output: str, *, force: bool, dry_run: bool = False) -> ConvertReport:
    options = dict(task.options)
    as_folder = output_is_folder(task)
    options["force"] = force
    dst = f"{output}/" if as_folder else output
    return convert(task.item.path, dst, dry_run=dry_run, progress=LISTENER.get(), **options)


def inspect_item(task: Task) -> ItemOutcome:
    """Inspect an item. Unreadable files of a folder, or an unmet requirement, are the reason."""
    item, options = task.item, task.options
    refuse_unreadable(item)
    with item_checkpoint(item, follow_links=bool(options.get("follow_links"))) as found:
        manifest = found.manifest
        unread = found.unread if isinstance(found, FolderCheckpoint) else ()
        format = item.format if item.kind == "folder" else manifest.format
        found.check_unchanged()
    wrong = [f"not read: {join_names([f'{each.name} ({each.why})' for each in unread])}"]
    try:
        if options.get("strict"):
            refuse_unknown(manifest, otherwise=WITHOUT_STRICT)
    except UntrustedError as error:
        wrong.append(str(error))
    if "select" in options:
        manifest = manifest.select(options["select"])
    try:
        if "require" in options:
            manifest.require(options["require"])
    except CheckFailed as error:
        wrong.append(str(error))
    reason = "; ".join(wrong if unread else wrong[1:])
    return ItemOutcome(Contents.of(manifest, format)._asdict(), 0, reason=reason)


def _validated(task: Task, known: LedgerEntry | None, *, force: bool) -> ItemOutcome:
    """Validate an item, and write the report, which may replace only a report of ours."""
    refuse_unreadable(task.item)
    options = {name: each for name, each in task.options.items() if name != "force"}
    report = validate(task.item.path, progress=LISTENER.get(), **options).to_json()
    output, nbytes = task.item.output, 0
    if output:
        data = _timeless(report)
        tree = tree_at(output)
        taken = tree.is_taken()
        if not taken or not tree.holds(data):
            if taken and not force and not is_ours(known, output):
                raise other_error(task)
            with destination_of(output).new_file([], force=taken) as file:
                file.write(Plan("relay", len(data), (), (Write(0, data),)))
                file.commit()
            nbytes = len(data)
    failed = [each for each in report["checks"] if each["outcome"] == "failed"]
    wrong = "; ".join(f"{each['check']}: {each['title']}" for each in failed)
    hint = next((each["data"]["hint"] for each in failed if "hint" in each["data"]), None)
    return ItemOutcome(report, nbytes, reason=wrong, hint=hint)


def contents_of(task: Task) -> Contents | None:
    """Return an item's contents from its metadata; None if unreadable or not a checkpoint."""
    item = task.item
    if item.kind in (*UNREADABLE, "other"):
        return None
    try:
        with item_checkpoint(item, follow_links=bool(task.options.get("follow_links"))) as found:
            return Contents.of(found.manifest, item.format or found.manifest.format)
    except Exception:  # the verb reports that
        return None


def _timeless(report: Mapping[str, Any]) -> bytes:
    """Return a report without its duration, so that equal results give equal files."""
    checks = [
        {**each, "data": {name: said for name, said in each["data"].items() if name != "seconds"}}
        for each in report["checks"]
    ]
    return (json.dumps({**report, "checks": checks}, indent=2) + "\n").encode()


def _folder_copied(task: Task, output: str, force: bool) -> ItemOutcome:
    """Copy a folder unchanged."""
    files = all_files(task.item.path, [], follow_links=bool(task.options.get("follow_links")))
    check_apart(task.item.path, output)
    with destination_of(output).new_folder([], force=force, like=task.item.path) as made:
        for each in files.values():
            each.copy_into(made, LISTENER.get())
        made.commit()
    return ItemOutcome(None, sum(each.nbytes for each in files.values()), copied=True)


def copy_of(task: Task) -> Companion:
    """Plan the copy of a file; a configuration gets the dtype of the weights."""
    item = task.item
    made = Companion(item.name, item.path, item.nbytes)
    if task.verb == "convert" and item.name.rpartition("/")[2] == CONFIGURATION:
        dtype = casts_of(task.options.get("dtype"), ()).model
        made = made if dtype is None else with_dtype(made, dtype)
    return made


def _copied(task: Task, output: str, force: bool) -> ItemOutcome:
    """Copy a file."""
    content = copy_of(task).content
    with place_of(task.item.path).open() as source:
        nbytes = source.nbytes if content is None else len(content)
        plan = Plan("clone", nbytes, (Copy(0, nbytes, 0),) if nbytes else (), ())
        if content is not None:
            plan = Plan("relay", nbytes, (), (Write(0, content),))
        with destination_of(output).new_file([source], force=force) as file:
            file.write(plan, LISTENER.get())
            file.commit()
    return ItemOutcome(None, nbytes, copied=True)


def refuse_unreadable(item: Item) -> None:
    """Raises InputError for an item that can't be read, or that is only in the other tree."""
    if item.kind == MISSING:
        raise InputError(
            f"nothing here goes by this name, to be compared with {item.path}",
            hint="--exclude leaves it out",
        )
    if item.kind in UNREADABLE:
        raise _unreadable_error(item)


def _unreadable_error(item: Item) -> InputError:
    """Return the error of an item that can't be read."""
    try:
        if os.path.isdir(item.path):
            os.listdir(item.path)
        else:
            with place_of(item.path).open() as source:
                source.read(0, min(source.nbytes, 1))
    except InputError as error:
        return error
    except OSError as error:
        return InputError(f"can't be read: {error.strerror}", path=item.path)
    return InputError("could not be read when the tree was scanned", path=item.path)
