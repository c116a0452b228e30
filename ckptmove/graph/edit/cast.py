"""Decide which tensors are cast to another dtype, and apply that to a graph.

Only floating-point tensors of the model are cast unless a rule names others: never integers, never
RNG states, and the optimizer only by name. A storage is cast as a whole, so the tensors on it must
agree. The parts of a composite tensor are not cast, because they are not numbers by themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ...errors import RefusedError, UsageError
from ...manifest.dtypes import ALIASES, BITS
from ...manifest.manifest import Section, TensorEntry
from ...pickles.nodes import Call, Node, Persistent, Tuple
from ...torch_pickle.values.tensors import Recogniser
from ..draft import CheckpointGraph
from ..patterns import covers, no_match
from ..plain_tensors import is_plain
from ..traversal import nodes_of

#: A dtype: torch's name for it, with or without `torch.`, or an object with such a text.
Dtype = object

_SHORT = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_FLOATING = ("float64", "float32", "float16", "bfloat16")
_TARGETS = (*_FLOATING, "float8_e4m3fn", "float8_e5m2")


class Casts(NamedTuple):
    """Rules about dtypes, checked."""

    #: for the model's floating-point tensors, or None to keep theirs
    model: str | None
    #: (pattern, dtype); the last one that matches a tensor counts
    named: tuple[tuple[str, str], ...]
    #: patterns of tensors that are never cast
    keep: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.model is not None or bool(self.named)

    def sections(self, entries: Sequence[TensorEntry]) -> frozenset[str]:
        """Return the patterns that mean a section, because no tensor has that name.

        RefusedError if a pattern matches nothing.
        """
        found = set[str]()
        for pattern in (*(pattern for pattern, _ in self.named), *self.keep):
            if any(_speaks_of(pattern, entry) for entry in entries):
                continue
            if not any(entry.section.value == pattern for entry in entries):
                raise no_match(pattern)
            found.add(pattern)
        return frozenset(found)

    def dtype_for(self, entry: TensorEntry, sections: Collection[str]) -> str | None:
        """Return the dtype to cast a tensor to, or None; `sections` comes from that method."""
        if entry.dtype not in _FLOATING or entry.part_of is not None or entry.layout != "strided":
            return None
        if any(_speaks_of(pattern, entry, sections) for pattern in self.keep):
            return None
        for pattern, dtype in reversed(self.named):
            if _speaks_of(pattern, entry, sections):
                return dtype
        return self.model if entry.section in (Section.MODEL, Section.EMA) else None


def _speaks_of(pattern: str, entry: TensorEntry, sections: Collection[str] = ()) -> bool:
    if pattern in sections:
        return entry.section.value == pattern
    return any(name is not None and covers(pattern, name) for name in (entry.name, entry.state_key))


def casts_of(dtype: Mapping[str, Dtype] | Dtype | None, keep: Iterable[str]) -> Casts:
    """Check the rules of a user: patterns, and the dtype of each, with `""` for the model.

    UsageError if tensors can't be cast to a dtype, or nothing is cast.
    """
    rules = dtype if isinstance(dtype, Mapping) else {} if dtype is None else {"": dtype}
    known = {pattern: _dtype(each) for pattern, each in rules.items()}
    model = known.pop("", None)
    casts = Casts(model, tuple(known.items()), tuple(keep))
    if casts.keep and not casts:
        raise UsageError("--keep-dtype needs --dtype", hint="e.g. --dtype bf16")
    return casts


def _dtype(given: Dtype) -> str:
    name = str(given).removeprefix("torch.")
    full = _SHORT.get(name) or ALIASES.get(name) or name
    if full not in _TARGETS:
        raise UsageError(
            f"{name!r} is not a dtype to cast to", hint=f"one of bf16, fp16, {', '.join(_TARGETS)}"
        )
    return full


def cast(
    draft: CheckpointGraph, tensors: Sequence[tuple[TensorEntry, Node]], casts: Casts
) -> dict[str, int]:
    """Change the dtypes of storages in a draft; return counts such as `float32→bfloat16` → 3.

    RefusedError if tensors of one storage would be cast differently, or can't be cast; or if a
    pattern matches nothing.
    """
    recogniser = Recogniser(draft.graph.ids)
    wanted: dict[str, tuple[str | None, str]] = {}  # storage → dtype, and the name of the tensor
    dtypes: dict[str, str] = {}  # storage → dtypes of its tensors
    users: dict[str, list[Call]] = {}
    counts: dict[str, int] = {}
    sections = casts.sections([entry for entry, _ in tensors])
    for entry, node in tensors:
        if entry.storage is None:
            continue
        dtype = casts.dtype_for(entry, sections)
        plain = [each for each in nodes_of(node) if is_plain(each)]
        if len(plain) != 1:  # a storage itself, or a tensor that only its own function can read
            dtype = None
        before, name = wanted.setdefault(entry.storage, (dtype, entry.name))
        if before != dtype:
            raise RefusedError(
                f"{name!r} and {entry.name!r} share a storage, so they can't have different dtypes",
                hint="use --keep-dtype for both or for neither",
            )
        if dtype is not None and dtypes.setdefault(entry.storage, entry.dtype) != entry.dtype:
            raise RefusedError(f"{name!r} can't be cast: tensors of several dtypes use its bytes")
        if dtype not in (None, entry.dtype):
            counts[f"{entry.dtype}→{dtype}"] = counts.get(f"{entry.dtype}→{dtype}", 0) + 1
            users.setdefault(entry.storage, []).extend(c for c in plain if isinstance(c, Call))
    for storage, calls in users.items():
        dtype, name = wanted[storage]
        assert dtype is not None
        once = list({id(each): each for each in calls}.values())
        _retype(draft, storage, dtype, once, recogniser, name)
    return counts


def _retype(
    draft: CheckpointGraph,
    id: str,
    dtype: str,
    calls: list[Call],
    recogniser: Recogniser,
    name: str,
) -> None:
    """Give one storage, and the tensors on it, another dtype."""
    stored = draft.stored[id]
    found = [(call, recogniser.tensor(call)) for call in calls]
    (old,) = {tensor.dtype for _, tensor in found if tensor is not None}
    if stored.nbytes * 8 % BITS[old]:
        raise RefusedError(f"{name!r} can't be cast: its storage ends in the middle of an element")
    nbytes = stored.nbytes * BITS[dtype] // BITS[old]
    draft.stored[id] = stored._replace(dtype=dtype, nbytes=nbytes, cast_from=old)
    graph = draft.graph
    graph.retype(id, dtype, nbytes, stored.location)
    for call, tensor in found:
        assert tensor is not None
        if graph.respell_compact(call, graph.storages[id], dtype):
            continue
        assert isinstance(call.args, Tuple)
        items = call.args.items
        storage = items[0]
        assert isinstance(storage, Persistent)
        rest = tuple(items[7:] if call.qualname == "torch._utils._rebuild_tensor_v3" else items[6:])
        graph.respell(
            call,
            storage,
            dtype,
            tensor.shape,
            tensor.stride,
            tensor.offset,
            items[4],
            items[5],
            rest,
        )
