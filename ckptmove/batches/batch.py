"""Implements `ckptmove.batch`: run a verb on every checkpoint of a tree."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..errors import StrPath, UsageError, accept_former_names
from ..writing.verify import Progress
from .options import absolute, from_root
from .planning import plan_batch
from .running import Batch

if TYPE_CHECKING:
    from .executors.ray_executor import Cluster


@accept_former_names(copy_others="copy_rest")
def batch(
    verb: str,
    src: StrPath,
    dst: StrPath | None = None,
    *,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    copy_rest: bool = False,
    jobs: int | None = None,
    executor: Executor | None = None,
    ray: str | None = None,
    shard_of: str | None = None,
    retry: StrPath | None = None,
    verify: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Batch:
    """Relocate, convert or validate all checkpoints of a folder tree.

    Checkpoints are found by their content, not by their names. `convert` and `validate` take a
    model folder, or an index with its files, as one item. Links to files are followed, links to
    folders are not. Everything is planned before this function returns; the work is done while you
    iterate over the result. If an item fails, the others still run.

    A ledger in the destination records finished items, so a run that was killed can be started
    again to resume. Two runs at the same time share the work (in an object store they may do an
    item twice, which does no harm). An item is done again if the file, the options, what it is
    compared with, or the version has changed. An existing output that is equal byte for byte to
    what would be written is kept; any other one is refused without `force`. If you may stop before
    the end, use the batch as a context manager, or close it.

    Args:
        verb: `relocate`, `convert` or `validate`.
        src: the folder of the tree.
        dst: the folder for the new tree, with the same subfolders. `validate` writes a JSON report
            of each item there, or nothing without `dst`. With `in_place`, leave it out.
        include: do only items whose name matches one of these globs, such as `runs/*/last.ckpt`.
            `*` matches slashes too. A glob without a slash may also match the last part of a name
            alone. A glob that starts with a slash must match the whole name, or that of a folder
            above it.
        exclude: leave out items and folders whose name matches one of these globs; such folders are
            not read.
        copy_rest: also copy files that are not checkpoints.
        jobs: number of processes. Default: one per core.
        executor: an executor of `concurrent.futures`, or one with the same `submit`, that does the
            work instead. It stays open. Calls and their arguments are pickled if it needs that.
        ray: run on the Ray cluster at this address, such as `auto` or `HOST:6379`. All its nodes
            must see the tree and the destination under the same paths, and have the same version of
            ckptmove. Each item takes one CPU; very large items are divided among several. If a node
            dies, others do its items.
        shard_of: `i/N`: divide the items into N shares and do only share i, counted from 1.
        retry: a log that `ckptmove batch … --log` wrote: do only the items that failed or were
            refused in it.
        verify: read finished outputs again, to check that they have not changed.
        dry_run: plan only. Each item is checked only when it is done.
        progress: a function that is called with the number of source bytes done since the last
            call; they add up to `plan.nbytes`.
        options: options of the verb, as its function takes them. `against` of `validate` is another
            tree: each item is compared with the checkpoint of the same name in it, or with the only
            one that differs just in the suffix. `force` of `validate` replaces reports that another
            run did not write.

    Returns:
        The batch: `plan` says what will be done; iterating over it gives a `Result` per item.

    Raises:
        UsageError: the request makes no sense, or the Ray cluster cannot be reached.
        InputError: the tree cannot be read.
        RefusedError: two items would get the same name, there is not enough disk space, or the
            destination cannot be written.
        WriteError: a folder cannot be made.
    """
    if jobs is not None and jobs < 1:
        raise UsageError("jobs must be at least 1")
    if executor is None:
        _refuse_memory(src, dst)
    if ray is not None and (executor is not None or jobs is not None):
        raise UsageError("ray cannot be combined with jobs or an executor")
    if executor is not None or ray is not None:  # they may be in another folder
        src, dst = absolute(src), None if dst is None else absolute(dst)
        options = from_root(options)
    cluster = _joined(ray) if ray is not None and not dry_run else None
    with ExitStack() as failing:
        if cluster is not None:
            failing.callback(cluster.stop)
        plan = plan_batch(
            verb,
            src,
            dst,
            include=(include,) if isinstance(include, str) else tuple(include),
            exclude=(exclude,) if isinstance(exclude, str) else tuple(exclude),
            copy_rest=copy_rest,
            shard_of=shard_of,
            retry=retry,
            verify=verify,
            dry_run=dry_run,
            options=options,
        )
        failing.pop_all()
    return Batch(plan, jobs or _cores(), executor, progress, cluster=cluster, dry_run=dry_run)


def _refuse_memory(*trees: StrPath | None) -> None:
    """Raises UsageError for what is in the memory of this process, which others do not see."""
    for tree in trees:
        if isinstance(tree, str) and tree.startswith("memory:"):
            hint = "executor=concurrent.futures.ThreadPoolExecutor()"
            raise UsageError("other processes cannot read memory: URLs", path=tree, hint=hint)


def _joined(address: str) -> Cluster:
    from .executors.ray_executor import Cluster  # only here: it takes a while to import

    return Cluster(address)


def _cores() -> int:
    """How many cores we may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
