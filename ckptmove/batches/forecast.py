"""Predict the result of an item from its metadata; write nothing."""

from __future__ import annotations

from .. import formats
from ..api.convert import convert
from ..api.relocate import relocate
from ..errors import CkptmoveError, RefusedError
from ..reports.batch.items import Task
from ..sources import place_of
from .run_item import (
    ItemOutcome,
    check_copied,
    copy_of,
    inspect_item,
    is_copied,
    of_conversion,
    of_relocation,
    other_error,
    output_is_folder,
    refuse_unreadable,
)
from .trees import tree_at
from .trees.local_tree import free_path_near


def forecast_item(task: Task) -> ItemOutcome:
    """Return what the verb would do with an item, and how much it would write; raises as the verb.

    An existing output is compared only by its size. The bytes of tensors are not read, and the
    checks of `validate` are not run.
    """
    item = task.item
    refuse_unreadable(item)
    if task.obstacle:
        raise RefusedError(task.obstacle)
    if task.verb == "inspect":
        return inspect_item(task)
    if task.verb == "validate":
        with formats.open_checkpoint(
            item.path, follow_links=bool(task.options.get("follow_links"))
        ):
            return ItemOutcome(None, 0)
    if is_copied(task):
        check_copied(task)
        if task.in_place:
            return ItemOutcome(None, 0, copied=True)
        is_folder = item.kind == "folder"
        sizes = tree_at(item.path).sizes() if is_folder else {"": copy_of(task).nbytes}
        _check_size(task, sizes)
        return ItemOutcome(None, sum(sizes.values()), copied=True)
    if not task.in_place and not output_is_folder(task) and place_of(item.output).is_folder():
        raise RefusedError("the destination is a directory")
    output = _where(item.output)
    try:
        return _dry(task, output)
    except CkptmoveError as error:
        if error.path is not None and error.path.startswith(output):
            error.path = item.output
        raise


def _dry(task: Task, output: str) -> ItemOutcome:
    options = {**task.options, "dry_run": True}
    if task.verb == "relocate":
        options["allow_unmatched"] = True
        if not task.in_place:
            options |= {"dst": output, "force": True}
        report = relocate(task.item.path, **options)
        nothing = task.in_place or report.destination is None  # of the size of the whole
        nbytes = 0 if nothing else report.destination_nbytes
        _check_size(task, {each.name: each.nbytes for each in report.files} or {"": nbytes})
        return of_relocation(report, nbytes)
    options["force"] = bool(task.options.get("force")) or bool(task.existing)
    as_folder = output_is_folder(task)
    made = convert(task.item.path, f"{output}/" if as_folder else output, **options)
    base = output.rstrip("/")
    sizes = {path[len(base) :].lstrip("/"): nbytes for path, nbytes in made.files.items()}
    _check_size(task, sizes)
    return of_conversion(made, sum(sizes.values()))


def _check_size(task: Task, sizes: dict[str, int]) -> None:
    """Raises RefusedError if an existing output that would be compared has other sizes."""
    if task.existing == "compared" and tree_at(task.item.output).sizes() != sizes:
        raise other_error(task)


def _where(output: str) -> str:
    """Return a free path near an output, whose folder may have to be made first."""
    return free_path_near(output) if output and place_of(output).opens_by_path else output
