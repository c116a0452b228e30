"""Implements `ckptmove.convert`: write a checkpoint in another format."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from .. import formats
from ..errors import RefusedError, StrPath, UsageError, accept_former_names
from ..formats.folders.model_folder import Weights, weights_of
from ..formats.writing import WriteOptions, WritePlan
from ..graph.draft import CheckpointGraph
from ..graph.edit.cast import Casts, Dtype, cast, casts_of
from ..graph.edit.flatten_modules import flatten
from ..graph.edit.model_weights import section_asked
from ..graph.edit.narrow import leave
from ..graph.edit.numpy_arrays import tensors_for_arrays
from ..graph.edit.subtree import rename_keys, renaming, state_dicts
from ..graph.patterns import covers
from ..phrases import plural
from ..pickles.terms import TooLong
from ..placement.place import Kept, place
from ..placement.rules import Device, rules_of
from ..reports.convert import ConvertReport
from ..reports.data.loss import Loss
from ..sources import place_of
from ..torch_pickle.values.tensors import Recogniser
from ..writing.verify import Progress
from .folder_files import Companion, check_apart, companions_of
from .strict import refuse_unknown, refuse_unknown_in
from .target import Target, nbytes_of_text, target_of
from .trust import plan_trusted

_MOST_TOLD = 6  # losses
_SECTIONS_OF_WEIGHTS = frozenset(("model", "ema"))
_WITHOUT_STRICT = "without --strict it is converted all the same"
_MOST_TIMES = 8  # as long as the source, unless somebody insists
_MOST_AT_LEAST = 1 << 20  # bytes that even the smallest may become
#: What DistributedDataParallel and torch.compile put into names.
_COMPILED = r"s/\b_orig_mod\.//g"
_WRAPPERS = r"s/^((module|_orig_mod)\.)+|\b_orig_mod\.//g"

#: What each preset stands for, in options of `convert`.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "lightning": {"root": "state_dict", "rename": (_COMPILED,), "strip_prefix": "model"},
    "hf": {"weights": "model", "rename": (_WRAPPERS,), "bare": True},
    "deploy": {"weights": "model", "rename": (_WRAPPERS,), "to": "cpu", "bare": True},
}


@accept_former_names(exclude="exclude_tensors")
@formats.uncollected()
def convert(
    src: StrPath,
    dst: StrPath,
    *,
    format: str | None = None,
    preset: str | None = None,
    select: str | Iterable[str] = (),
    exclude_tensors: str | Iterable[str] = (),
    root: str | None = None,
    weights: str | None = None,
    rename: str | Iterable[str] = (),
    strip_prefix: str | None = None,
    add_prefix: str | None = None,
    dtype: Mapping[str, Dtype] | Dtype | None = None,
    keep_dtype: str | Iterable[str] = (),
    to: Device | None = None,
    shared: str | None = None,
    bare: bool | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    drop: str | Iterable[str] = (),
    strict: bool = False,
    trust_objects: bool = False,
    follow_links: bool = False,
    dry_run: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Convert a checkpoint to another format; drop nothing unless the caller allows it.

    Nothing in the file is executed: objects are kept as inert data. torch is needed only if tensors
    are gathered or cast; the model's classes are never needed.

    Args:
        src: the checkpoint; it is not changed. It may be a file, an index of several files, or a
            model folder (also a Trainer checkpoint), of which the weights are converted.
        dst: the new checkpoint. It appears complete and verified, or not at all. It is a folder if
            it ends with a slash, is an existing folder, or if `max_shard_size` is given. From
            folder to folder, the other files are copied too: links to files are followed, links to
            folders are skipped with a warning. In an object store (a URL), the files of a folder
            appear one by one after all are verified, the index last.
        format: `safetensors`, `torch-zip` or `zip-bundle` (a dict of files). Default: by the suffix
            of `dst`.
        preset: use a set of options: `lightning`, `hf` or `deploy` (see `PRESETS`). Options that
            you give are added to it; `weights` replaces the `root` of a preset.
        select: write only entries whose name matches one of these globs, and everything below them.
            If no name matches, a glob may be the name of a section (`model`, `optimizer`, …).
        exclude_tensors: exclude entries whose name matches one of these globs, and everything below
            them.
        root: write only the entry with this name, as the top of the new checkpoint.
        weights: write only the state dict of one model (`model`), or its averaged weights (`ema`:
            EMA or SWA) under the names that the model uses.
        rename: substitutions in the keys of state dicts, `s/OLD/NEW/`, applied in order.
        strip_prefix: remove this prefix from keys of state dicts; a dot at its end may be left out.
        add_prefix: add this prefix to keys of state dicts; a dot at its end may be left out.
        dtype: cast the model's floating-point tensors to this dtype; or a mapping from globs, as
            for `select`, to dtypes.
        keep_dtype: do not cast tensors whose name matches one of these globs.
        to: tag the tensors with this device, as `relocate` does.
        shared: what to do with bytes that tensors share, if the format cannot share them: `keep`
            (default) writes them once and notes the other names, `duplicate` writes them under each
            name, `error` refuses.
        bare: write tensors only; the result cannot be converted back.
        metadata: text to add to the header of safetensors.
        max_shard_size: write a folder of files of at most this size: bytes, or text such as `5GB`.
        drop: drop entries whose name matches one of these globs if the target cannot store them, or
            if they call something that must not be written (see `trust_objects`).
        strict: refuse a source that names callables not known to be harmless (`UntrustedError`).
            This includes the files that are copied from a folder.
        trust_objects: allow the new pickle to name callables not known to be harmless, when the
            source is a format that runs nothing, such as safetensors.
        follow_links: follow symbolic links that lead out of a model folder.
        dry_run: decide everything; write nothing.
        force: replace an existing destination; allow a result more than eight times the size of the
            source.
        progress: a function that is called with the number of bytes copied and verified since the
            last call.

    Returns:
        What was written, dropped, cast and renamed.

    Raises:
        UsageError: the options make no sense.
        InputError: the source cannot be read, or is refused.
        RefusedError: something would be lost or overwritten, the options contradict each other, or
            a pickle would name callables that the source could not run and that are not known to be
            harmless.
        WriteError: writing or verifying failed.
    """
    started = time.monotonic()
    preset_ = _preset(preset)
    select = _texts(select, preset_, "select")
    exclude = _texts(exclude_tensors, preset_, "exclude_tensors")
    renamed = renaming(
        _texts(rename, preset_, "rename"),
        preset_.get("strip_prefix") if strip_prefix is None else strip_prefix,
        preset_.get("add_prefix") if add_prefix is None else add_prefix,
    )
    if root is None and weights is None:  # who names weights need not name their place
        root = preset_.get("root")
    weights = preset_.get("weights") if weights is None else weights
    to = preset_.get("to") if to is None else to
    casts = casts_of(dtype, _texts(keep_dtype, preset_, "keep_dtype"))
    bare = bool(preset_.get("bare") if bare is None else bare)
    if weights is not None:
        section_asked(weights)
    folder = weights_of(src) if place_of(src).is_folder() else None
    limit = None if max_shard_size is None else nbytes_of_text(max_shard_size)
    target = target_of(dst, format, sharded=limit is not None, stem=folder and folder.stem)
    whole = folder if target.is_folder else None
    manner = target.manner(shared or "keep", metadata, bare=bare, max_shard_nbytes=limit)
    with formats.opened(src, follow_links=follow_links) as found:
        if strict:
            refuse_unknown(found.manifest, otherwise=_WITHOUT_STRICT)
        draft = found.draft(nested=bool(root or weights or select))
        if bare or weights is not None or not _SECTIONS_OF_WEIGHTS.isdisjoint(select):
            arrays = tensors_for_arrays(draft)
            if arrays:
                draft.warnings.append(f"{plural(arrays, 'numpy array')} written as tensors")
        wanted = leave(draft, root=root, weights=weights, select=select, exclude=exclude)
        count = 0
        if bare or renamed is not None or set(select) == {"model"}:
            wanted.left_out.extend(flatten(draft))
        draft.warnings[:] = dict.fromkeys(draft.warnings)
        if renamed is not None:
            recogniser = Recogniser(draft.graph.ids)
            count = rename_keys(state_dicts(draft.graph.root, recogniser), renamed)
            if not count and (rename or strip_prefix or add_prefix):
                draft.warnings.append("no key of a state dict was renamed: none is so called")
        cast_ = _cast(draft, casts)
        kept = _move(draft, to)
        draft.losses += target.format.losses(draft, manner)
        drops = _texts(drop, {}, "drop")
        dropped = _refuse_losses(draft, drops)
        writing, untrusted, unknown = _planned(
            draft, target, manner, drops, trusted=trust_objects, force=force
        )
        dropped += untrusted
        companions = list[Companion]()
        if whole is not None:
            companions = _companions(
                os.fspath(src), whole, draft, target, writing, follow_links=follow_links
            )
        for each in companions if strict else ():
            if not each.is_folder:
                refuse_unknown_in(each.path, otherwise=_WITHOUT_STRICT)
        if dry_run:
            target.check(writing, draft.sources, companions, force=force)
        else:
            target.write(writing, draft.sources, companions, force=force, progress=progress)
        nbytes = sum(source.nbytes for source in draft.sources)
    besides = {each.name: each.nbytes for each in companions if not each.is_folder}
    sizes = {name: plan.nbytes for name, plan in writing.files.items()} | besides
    files = {target.file(name): size for name, size in sizes.items()}
    return ConvertReport(
        source=draft.path if whole is None else os.fspath(src),
        destination=target.path,
        source_format=draft.format,
        format=target.format.name,
        written=not dry_run,
        files=files,
        tensors=writing.tensors,
        left_out=tuple(wanted.left_out),
        weights=wanted.to_json(),
        dropped=tuple(dropped),
        shared=writing.shared,
        duplicates=writing.duplicates,
        cast=cast_,
        renamed=count,
        kept=tuple(kept),
        unknown_callables=unknown,
        warnings=tuple(draft.warnings),
        nbytes=nbytes + sum(besides.values()),
        bytes_written=0 if dry_run else sum(files.values()),
        seconds=time.monotonic() - started,
    )


def _planned(
    draft: CheckpointGraph,
    target: Target,
    manner: WriteOptions,
    drop: Sequence[str],
    *,
    trusted: bool,
    force: bool,
) -> tuple[WritePlan, list[Loss], tuple[str, ...]]:
    """Plan as `plan_trusted` does, but refuse what is far larger than its source.

    Raises:
        RefusedError: it is, and there is no `force`.
    """
    source = sum(each.nbytes for each in draft.sources)
    most = max(_MOST_TIMES * source, _MOST_AT_LEAST)
    if not force:
        manner = manner._replace(most_nbytes=most)
    try:
        planned = plan_trusted(draft, target.format, manner, drop, trusted=trusted)
        nbytes = sum(plan.nbytes for plan in planned[0].files.values())
        if force or nbytes <= most:
            return planned
        size = f"{nbytes:,}"
    except TooLong:
        size = f"more than {most:,}"
    raise RefusedError(
        f"would write {size} bytes from {source:,}: more than {_MOST_TIMES} times as many",
        hint="--force writes them all the same",
    )


def check_options(options: Mapping[str, Any]) -> None:
    """Look at options of `convert`, by their names, before there is a file.

    Raises:
        UsageError: they make no sense, whatever the file.
    """
    preset = _preset(options.get("preset"))
    renaming(
        _texts(options.get("rename", ()), preset, "rename"),
        options.get("strip_prefix"),
        options.get("add_prefix"),
    )
    if options.get("weights") is not None:
        section_asked(options["weights"])
    casts_of(options.get("dtype"), _texts(options.get("keep_dtype", ()), preset, "keep_dtype"))
    if options.get("to") is not None:
        rules_of(to=options["to"])
    size = options.get("max_shard_size")
    limit = None if size is None else nbytes_of_text(size)
    format = options.get("format") or formats.WRITABLE[0].name
    target = target_of("any/" if limit else "any", format, sharded=limit is not None)
    target.manner(
        options.get("shared") or "keep",
        options.get("metadata"),
        bare=bool(options.get("bare")),
        max_shard_nbytes=limit,
    )


def _companions(
    src: str,
    weights: Weights,
    draft: CheckpointGraph,
    target: Target,
    writing: WritePlan,
    *,
    follow_links: bool,
) -> list[Companion]:
    """What is copied from a folder that is converted as a whole.

    Raises:
        RefusedError: it can't be where the folder goes.
    """
    check_apart(src, target.path)
    read = {PurePath(source.path).name for source in draft.sources}
    found = companions_of(src, {*read, *weights.others}, draft.warnings, follow_links=follow_links)
    for each in found:
        if each.name.partition("/")[0] in writing.files:
            raise RefusedError(f"it has another {each.name!r} besides its weights", path=src)
    return found


def _preset(name: str | None) -> Mapping[str, Any]:
    if name is None:
        return {}
    if name not in PRESETS:
        raise UsageError(f"there is no preset {name!r}", hint=f"one of {', '.join(PRESETS)}")
    return PRESETS[name]


def _texts(given: str | Iterable[str], preset: Mapping[str, Any], option: str) -> tuple[str, ...]:
    """What an option says that may be given several times; a preset speaks first."""
    own = (given,) if isinstance(given, str) else tuple(given)
    return (*preset.get(option, ()), *own)


def _cast(draft: CheckpointGraph, casts: Casts) -> dict[str, int]:
    if not casts:
        return {}
    contents = draft.list_contents()
    return cast(draft, list(zip(contents.tensors, contents.nodes, strict=True)), casts)


def _move(draft: CheckpointGraph, to: Device | None) -> list[Kept]:
    """Tag the tensors of a draft with another device; gives what stays."""
    if to is None:
        return []
    moves = place(draft.manifest(), rules_of(to=to))
    if moves.tensors or moves.meshes or moves.remotes:
        raise RefusedError(
            "it has tensors that store their own device",
            hint="convert it without --to, and relocate the result",
        )
    draft.move(moves.storages)
    draft.warnings += moves.warnings
    return moves.kept


def _refuse_losses(draft: CheckpointGraph, drop: Sequence[str]) -> list[Loss]:
    """The losses, all of which were accepted.

    Raises:
        RefusedError: one was not.
    """
    left = [loss for loss in draft.losses if not any(covers(each, loss.name) for each in drop)]
    if left:
        told = [f"{loss.name}, which {loss.why}" for loss in left[:_MOST_TOLD]]
        more = [f"{len(left) - len(told):,} more"] if len(left) > len(told) else []
        drops = " ".join(f"--drop '{loss.name}'" for loss in left[:_MOST_TOLD])
        raise RefusedError(
            f"would lose {'; '.join([*told, *more])}",
            hint=f"{drops} {'accepts' if len(left) == 1 else 'accept'} that",
        )
    return list(draft.losses)
