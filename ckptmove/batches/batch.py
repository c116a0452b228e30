"""Implements `ckptmove.batch`: run a verb on every checkpoint of a tree."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, overload

from ..api.options import Option, declare_options
from ..errors import StrPath, UsageError
from ..sources.filesystem import reached_only_here
from ..sources.known_objects import remembering
from ..system.signals import HAS_TIMER, cores
from ..writing.verify import Progress
from .options import VerbName, absolute, from_root
from .planning import plan_batch
from .running import Batch
from .selection import FORMAT_NAMES, ItemFilter

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it since Python 3.11

    from .executors.ray_executor import Cluster
    from .keywords import OfConvert, OfInspect, OfRelocate, OfValidate


@overload
def batch(
    verb: Literal["inspect"],
    src: StrPath,
    dst: StrPath | None = None,
    **options: Unpack[OfInspect],
) -> Batch: ...
@overload
def batch(
    verb: Literal["relocate"],
    src: StrPath,
    dst: StrPath | None = None,
    **options: Unpack[OfRelocate],
) -> Batch: ...
@overload
def batch(
    verb: Literal["convert"],
    src: StrPath,
    dst: StrPath | None = None,
    **options: Unpack[OfConvert],
) -> Batch: ...
@overload
def batch(
    verb: Literal["validate"],
    src: StrPath,
    dst: StrPath | None = None,
    **options: Unpack[OfValidate],
) -> Batch: ...
@declare_options
def batch(
    verb: VerbName,
    src: StrPath,
    dst: StrPath | None = None,
    *,
    include: Annotated[
        str | Iterable[str],
        Option(
            "Do only items whose name matches GLOB.",
            "GLOB",
            "Which items",
            value="GLOB matches names in the tree, such as `runs/1/last.ckpt`. `*` matches slashes "
            "too. A GLOB without a slash may also match the last part of a name alone. A GLOB that "
            "starts with a slash must match the whole name, or that of a folder above it: "
            "`/last.ckpt` is only the file at the top. Folders that are left out are not read.",
        ),
    ] = (),
    exclude: Annotated[
        str | Iterable[str], Option("Leave out items and folders whose name matches GLOB.", "GLOB")
    ] = (),
    shard_of: Annotated[
        str | None,
        Option("Divide the items into N shares and do only share I; I counts from 1.", "I/N"),
    ] = None,
    retry: Annotated[
        StrPath | None,
        Option(
            "Do only the items that failed or were refused in this log, which ckptmove batch --log "
            "wrote.",
            "FILE",
        ),
    ] = None,
    format_in: Annotated[
        str | Iterable[str],
        Option(
            "Do only items of FORMAT.",
            "FORMAT",
            value=f"FORMAT is one of {', '.join(FORMAT_NAMES)}.",
        ),
    ] = (),
    newer: Annotated[
        str | None,
        Option(
            "Do only items changed since WHEN.",
            "WHEN",
            value="WHEN is a date, such as 2026-11-01 or 2026-11-01T12:30, or an age, such as 36h, "
            "7d or 2w.",
        ),
    ] = None,
    min_size: Annotated[
        int | str | None, Option("Do only items of at least SIZE, for example 100MB.", "SIZE")
    ] = None,
    max_size: Annotated[int | str | None, Option("Do only items of at most SIZE.", "SIZE")] = None,
    verify: Annotated[
        bool,
        Option(
            "Read again what earlier runs finished (outputs, or the checkpoints of batch "
            "validate), to check that nothing has changed.",
            group="Outputs",
        ),
    ] = False,
    copy_rest: Annotated[
        bool, Option("Also copy files that are not checkpoints.", former="copy_others")
    ] = False,
    keep_suffix: Annotated[
        bool,
        Option(
            "Keep the suffix of each item in front of the new one: run.pt becomes "
            "run.pt.safetensors. Items that differ only in the suffix can then all be converted."
        ),
    ] = False,
    digests: Annotated[
        bool,
        Option(
            "Compute the SHA-256 of each file in SRC and in DST. All bytes of SRC have to be read "
            "for that; DST is read anyway, to verify it."
        ),
    ] = False,
    delete_source: Annotated[
        bool,
        Option(
            "Remove the source of each item that is done, after its output was read again. Folders "
            "and links are kept."
        ),
    ] = False,
    jobs: Annotated[
        int | None,
        Option("Number of processes.", "N", "How to run", default="one per core", short="j"),
    ] = None,
    executor: Executor | None = None,
    max_failures: Annotated[
        int | None, Option("Stop when N items have failed or were refused.", "N")
    ] = None,
    timeout: Annotated[
        float | None,
        Option(
            "Give up on an item that takes longer, clean up, and do the others.",
            "SECONDS",
            python="Not with `executor`.",
        ),
    ] = None,
    allow_empty: Annotated[
        bool, Option("Accept that there are no items to do; otherwise that is refused.")
    ] = False,
    ray: Annotated[
        str | None,
        Option(
            "Run on a Ray cluster. auto is the cluster that this machine belongs to.",
            "ADDRESS",
            python="All its nodes must see the tree and the destination under the same paths, and "
            "have the same version of ckptmove. Each item takes one CPU, however large it is. If a "
            "node dies, others do its items.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        Option(
            "Write nothing. Read the metadata of each item, and show what would become of it; the "
            "exit code is that of the run. Bytes of tensors are not read, and checks of batch "
            "validate are not run."
        ),
    ] = False,
    progress: Progress | None = None,
    contents: bool = False,
    **options: Any,
) -> Batch:
    """Inspect, relocate, convert or validate all checkpoints of a folder tree.

    Checkpoints are found by their content, not by their names. The folder of a model or a trainer
    is one item; so is an index with its files, except for `relocate`. If a model lies beside
    checkpoints of its training run, each of these is an item, and so is each file of the model; the
    rest of its folder is copied. `relocate` copies checkpoints that store no devices (safetensors,
    folders of DCP) unchanged. Links to files are followed, links to folders are not. Everything is
    planned before this function returns; the work is done while you iterate over the result. If an
    item fails, the others still run.

    A ledger in the destination records finished items, so a run that was killed can be started
    again to resume. Two runs at the same time share the work (in an object store they may do an
    item twice, which does no harm). An item is done again if the file, the options, the checkpoint
    it is compared with, or the version has changed. An existing output with the same bytes as the
    new one is kept; any other output is refused without `force`. If you may stop before the end,
    use the batch as a context manager, or close it.

    Args:
        verb: `inspect`, `relocate`, `convert` or `validate`.
        src: the folder of the tree.
        dst: the folder for the new tree, with the same subfolders. `validate` writes a JSON report
            of each item there, or nothing without `dst`. With `in_place`, and for `inspect`, leave
            it out.
        executor: an executor of `concurrent.futures`, or one with the same `submit`, that does the
            work instead. It stays open. Calls and their arguments are pickled if it needs that.
        progress: a function that is called with the number of source bytes done since the last
            call; they add up to `plan.nbytes`.
        contents: also look at what each item holds, for `items` of the report, and its page.
        options: options of the verb, as its function takes them. `against` of `validate` is another
            tree: each item is compared with the checkpoint of the same name in it, or with the only
            one that differs just in the suffix. `force` of `validate` replaces reports that another
            run did not write.

    Returns:
        The batch: `plan` says what will be done; iterating over it gives a `Result` per item. With
        `dry_run`, each result says what would happen to the item. After it, `report()` of `inspect`
        is one table of the tree.

    Raises:
        UsageError: the request makes no sense, or the Ray cluster cannot be reached.
        InputError: the tree cannot be read.
        RefusedError: nothing is found, and `allow_empty` is not set; there is not enough disk
            space; or the destination cannot be written.
        WriteError: a folder cannot be made.
    """
    if jobs is not None and jobs < 1:
        raise UsageError("jobs must be at least 1")
    if executor is None:
        _refuse_private(src, dst)
    if max_failures is not None and max_failures < 1:
        raise UsageError("max-failures must be at least 1")
    if timeout is not None and not timeout > 0:
        raise UsageError("timeout must be more than 0 seconds")
    if timeout is not None and not HAS_TIMER:
        raise UsageError("timeout needs a timer, which this system lacks")
    if timeout is not None and executor is not None:
        raise UsageError("timeout cannot be combined with an executor")
    if ray is not None and (executor is not None or jobs is not None):
        raise UsageError("ray cannot be combined with jobs or an executor")
    if executor is not None or ray is not None:  # they may be in another folder
        src, dst = absolute(src), None if dst is None else absolute(dst)
        options = from_root(options)
    wanted = ItemFilter(
        include,
        exclude,
        shard_of=shard_of,
        retry=retry,
        formats=format_in,
        newer=newer,
        min_size=min_size,
        max_size=max_size,
    )
    cluster = _joined(ray) if ray is not None and not dry_run else None
    with ExitStack() as failing, remembering() as known:
        if cluster is not None:
            failing.callback(cluster.stop)
        plan = plan_batch(
            verb,
            src,
            dst,
            wanted=wanted,
            copy_rest=copy_rest,
            keep_suffix=keep_suffix,
            digests=digests,
            delete_source=delete_source,
            timeout=timeout,
            allow_empty=allow_empty,
            verify=verify,
            dry_run=dry_run,
            options=options,
        )
        if contents:
            tasks = tuple(task._replace(contents=True) for task in plan.tasks)
            plan = replace(plan, tasks=tasks)
        failing.pop_all()
    return Batch(
        plan,
        jobs or cores(),
        executor,
        progress,
        cluster=cluster,
        dry_run=dry_run,
        max_failures=max_failures,
        known_objects=known,
    )


def _refuse_private(*trees: StrPath | None) -> None:
    """Raises UsageError for a tree that other processes can't see."""
    for tree in trees:
        why = reached_only_here(tree) if isinstance(tree, str) else ""
        if why:
            hint = "executor=concurrent.futures.ThreadPoolExecutor()"
            raise UsageError(why, path=tree, hint=hint)


def _joined(address: str) -> Cluster:
    from .executors.ray_executor import Cluster  # imported only here: it is slow

    return Cluster(address)
