"""The options of a batch of each verb, as type checkers know them.

Options of a verb are declared at its function, options of all batches at `batch`.
`tests/batches/test_batch_typing.py` compares the two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Literal, TypedDict

from ..api.options import Weights
from ..errors import StrPath
from ..graph.edit.cast import Dtype
from ..manifest.device import Device
from ..writing.verify import Progress

_Globs = str | Iterable[str]


class OfAnyVerb(TypedDict, total=False):
    """Options of a batch of any verb."""

    include: _Globs
    exclude: _Globs
    shard_of: str | None
    retry: StrPath | None
    format_in: _Globs
    newer: str | None
    min_size: int | str | None
    max_size: int | str | None
    verify: bool
    copy_rest: bool
    keep_suffix: bool
    digests: bool
    delete_source: bool
    jobs: int | None
    executor: Executor | None
    max_failures: int | None
    timeout: float | None
    allow_empty: bool
    ray: str | None
    dry_run: bool
    progress: Progress | None
    contents: bool
    follow_links: bool


class OfInspect(OfAnyVerb, total=False):
    """Options of `batch("inspect")`."""

    select: _Globs | None
    require: str | None
    chunks: bool
    strict: bool


class OfRelocate(OfAnyVerb, total=False):
    """Options of `batch("relocate")`."""

    to: Device | None
    map: Mapping[str, Device] | None
    place: Mapping[str, Device] | None
    device_map: Mapping[str, Device] | StrPath | None
    all: bool
    values: bool
    in_place: bool
    force: bool
    strict: bool


class OfConvert(OfAnyVerb, total=False):
    """Options of `batch("convert")`."""

    select: _Globs
    exclude_tensors: _Globs
    root: str | None
    weights: Weights | None
    preset: str | None
    format: str | None
    shared: Literal["keep", "duplicate", "error"]
    bare: bool | None
    metadata: Mapping[str, str] | None
    max_shard_size: int | str | None
    ranks: int | None
    rename: _Globs
    strip_prefix: str | None
    add_prefix: str | None
    optimizer_ids: Literal["int", "name"] | None
    dtype: Mapping[str, Dtype] | Dtype | None
    keep_dtype: _Globs
    to: Device | None
    drop: _Globs
    keep_files: _Globs
    trust_objects: bool
    force: bool
    strict: bool


class OfValidate(OfAnyVerb, total=False):
    """Options of `batch("validate")`; `timeout` applies to each item."""

    against: StrPath | None
    subset: bool
    ignore_code: bool
    model: str | os.PathLike[str] | Callable[..., Any] | None
    input: str | Sequence[str]
    step: Literal["forward", "train"] | None
    optimizer: str | None
    device: str
    simulate: bool
    trust_pickle: bool
    force: bool
    strict: bool
