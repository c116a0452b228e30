"""batch: do a verb for every checkpoint of a tree."""

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
    """Do a verb for every checkpoint of a tree; gives the results as they come.

    Checkpoints are found by their content. A folder of a model, and an index with its files, is one
    item for `convert` and `validate`. Links to files are followed, links to folders are not. All is
    planned before this returns; it runs as it is iterated over. An item that fails stops no other.
    What is done is entered into a ledger in the destination: a run that was killed or broken off
    goes on where it was, and two at once share the work, or in a store at least do no harm. An item
    is done anew if the file, the options, what it is compared with, or the version is another.
    An output that is there already, and is byte for byte what would be written, is left alone; if
    it is anything else, the item is refused without `force`. Who may break off before the end uses
    the batch as a context, or closes it.

    Args:
        verb: `relocate`, `convert` or `validate`.
        src: the folder that the tree is in.
        dst: the folder for the new tree, with the same folders. `validate` puts a report of each
            item there, as JSON, and without `dst` nothing. With `in_place` there is none.
        include, exclude: globs on names in the tree, such as `runs/*/last.ckpt`; `*` also stands
            for slashes, and a glob without one may match the last part alone. One that starts with
            a slash has to match the whole name, or that of a folder above. A folder that is
            excluded is not looked into.
        copy_rest: copy also what is no checkpoint.
        jobs: how many processes; by default as many as there are cores.
        executor: who does the work instead: threads, processes, or another machine. Calls of
            `executor.submit` with what can be pickled are all that it has to take; it stays open.
        ray: the address of a Ray cluster that does the work, such as `auto` or `HOST:6379`. All its
            nodes must see the tree and the destination under the same paths, and have the same
            ckptmove. Each item takes one CPU, or a few in turn where it is so large that the others
            would wait for it. What was at a node that died is done by another.
        shard_of: `i/N`, i from 1: do only the i-th of N shares of the tree.
        retry: a log that `ckptmove batch … --log` wrote: do only what was refused or failed there.
        verify: read also the outputs that are done already, to see that they are what was written.
        dry_run: plan which items are done and to where, and do nothing; each is checked when it is
            done.
        progress: called with the bytes of sources that were done since the last call; they add up
            to `plan.nbytes`.
        options: of the verb. `exclude_tensors` is `convert`'s `exclude`; `against` of `validate` is
            another tree, in which the same name is looked up, or that with another suffix; and its
            `force` replaces reports that are not of a run before.

    Raises:
        UsageError: the request makes no sense, or there is no such cluster.
        InputError: the tree can't be read.
        RefusedError: two items would get one name, there is no room, or nothing can be written.
        WriteError: a folder can't be made.
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
