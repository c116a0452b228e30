"""Show a manifest as a summary, or as a list of tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from ..display.blocks import Block, Table
from ..display.phrases import plural, short, show_name
from ..display.text import cut, first_names, shape, size
from ..manifest.manifest import Manifest, TensorEntry
from ..manifest.other_records import NamedDevice, RecordKind
from ..manifest.paths import spell
from ..pickles.nodes import (
    Mapping,
)
from ..sources.place import mask_secrets
from ..torch_pickle.children import children_of
from ..torch_pickle.sections.sections import is_module_state
from .folder_files import files_of, shares_of
from .groups import groups_of
from .tree import LONGEST_KEY, LONGEST_VALUE, value_text

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..display.columns import Columns, PageBlock

#: The attributes that torch.nn.Module gives every module: torch/nn/modules/module.py, `__init__`.
_OF_EVERY_MODULE = {
    *("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook", "_forward_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks"),
    *("_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_backend"),
}
_LONGEST_NAME = 72  # characters of a tensor's name in a summary
_MOST_VALUES = 10  # values that name a device
_TOTALS = "section", "device", "dtype", "tensors", "storages", "bytes"
_GROUPS = "tensor", "", "shape", "dtype", "device", "bytes", ""


class FileManifest(Manifest):
    """The manifest of a checkpoint, as `inspect` returns it.

    It shows itself as `ckptmove inspect` does. Otherwise it is a `Manifest`.
    """

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Build one from a plain manifest."""
        return cls(**{each.name: getattr(manifest, each.name) for each in fields(manifest)})

    def blocks(self, *, full: bool = False) -> Iterator[Block]:
        """Show a summary."""
        return summary(self, full=full)

    def page(self) -> Iterator[PageBlock]:
        """Show a map of the bytes and every tensor, too."""
        yield from self._with_remarks()
        yield from shares_of(self)
        if self.tensors:
            yield tensor_columns(self)


# -- the summary -------------------------------------------------------------------------------


def summary(manifest: Manifest, *, full: bool = False) -> Iterator[Block]:
    """Show the verdict, totals by section, device and dtype, the tensors by layer, and the rest."""
    writer = f", written by {manifest.writer}" if manifest.writer else ""
    yield manifest.verdict
    path = cut(mask_secrets(manifest.path), None if full else LONGEST_KEY)
    yield f"{path}: {manifest.format}, {size(manifest.nbytes)}{writer}"
    if manifest.fetched is not None:
        count = plural(manifest.fetched.requests, "request")
        yield f"fetched {size(manifest.fetched.nbytes)} of {size(manifest.nbytes)} in {count}"
    if manifest.tensors:
        yield from ("", Table(list(_total_rows(manifest)), _TOTALS, right=(3, 4, 5)))
        rows = []
        for group in groups_of(manifest, full=full):
            name, *rest = group.row(manifest)
            rows.append((name if full else cut(name, _LONGEST_NAME), *rest))
        yield from ("", Table(rows, _GROUPS, right=(5,)))
    yield from files_of(manifest, full=full)
    yield from _notes(manifest, full)


def _total_rows(manifest: Manifest) -> Iterator[tuple[str, ...]]:
    totals = manifest.totals(lambda e: (str(e.section), manifest.device_of(e), e.dtype))
    order = list(manifest.sections)
    rows = sorted(totals.items(), key=lambda item: order.index(item[0][0]))
    before = ""
    for (section, device, dtype), total in rows:
        counts = f"{total.tensors:,}", f"{total.storages:,}", size(total.nbytes)
        yield ("" if section == before else section, device, dtype, *counts)
        before = section


def _notes(manifest: Manifest, full: bool) -> Iterator[Block]:
    def some(names: Sequence[str]) -> str:
        return first_names(names, len(names) if full else _MOST_VALUES)

    besides = list(_besides(manifest))
    if besides:
        yield from ("", f"other values: {some(besides)}")
    if manifest.divisions:
        divided = Counter(manifest.divisions.values()).most_common()
        yield from ("", f"chunks: {some([f'{how} ×{n:,}' for how, n in divided])}")
        if manifest.mesh_shapes:
            yield f"mesh: {some(manifest.mesh_shapes)}"
    held = list(_records(manifest, full))
    if held:
        yield from ("", f"records: {some(held)}")
    if manifest.metadata:
        said = [f"{short(key)}={short(text)}" for key, text in manifest.metadata.items()]
        yield from ("", f"metadata: {some(said)}")
    yield from _named_devices(manifest, full)
    if manifest.objects:
        counted = [f"{name} ×{n}" if n > 1 else name for name, n in manifest.objects.items()]
        yield from ("", f"objects: {some(counted)}")
    if manifest.unknown_callables:
        how = "loading the file would import"
        if manifest.format.startswith("safetensors"):
            how = "a pickle made from it would import"
        yield from ("", f"unknown callables, which {how}: {some(manifest.unknown_callables)}")


def _records(manifest: Manifest, full: bool) -> Iterator[str]:
    """Return files in the checkpoint by name; for code and the like, their total."""
    for kind in RecordKind:
        held = [record for record in manifest.records if record.kind is kind]
        if full or kind is RecordKind.DATA:
            yield from (f"{each.name} ({kind}, {size(each.nbytes)})" for each in held)
        elif held and kind.is_content:
            yield f"{kind} ×{len(held):,} ({size(sum(each.nbytes for each in held))})"


def _named_devices(manifest: Manifest, full: bool) -> Iterator[Block]:
    """Return the user's values that name a device; for a program, how often each is named."""
    own = [v for v in manifest.values_naming_devices if not v.follows]
    if own:
        title = (
            "values that name a device (torch.load leaves them as they are, also with "
            "map_location; a callable that gets one may use it):"
        )
        yield from named_devices(own, title, full=full)
    graph = [v for v in manifest.values_naming_devices if v.follows]
    if graph:
        counted = Counter(v.value for v in graph).most_common()
        counts = [f"{device} ×{n:,}" for device, n in counted]
        yield from ("", f"graph: {first_names(counts)} (relocate changes these with the tensors)")
        yield Table(_device_rows(graph) if full else (), indent=2)


def named_devices(
    values: Sequence[NamedDevice], title: str, *, full: bool = False
) -> Iterator[Block]:
    """Return values that name a device, under a title; only the first of many, unless `full`."""
    shown = values if full else values[:_MOST_VALUES]
    yield from ("", title, Table(_device_rows(shown), indent=2))
    if len(shown) < len(values):
        yield f"  … {len(values) - len(shown):,} more"


def _device_rows(values: Sequence[NamedDevice]) -> list[tuple[str, str, str]]:
    return [(show_name(value.name), value.value, value.kind) for value in values]


def _besides(manifest: Manifest) -> Iterator[str]:
    """Return the top-level values beside the tensors: `epoch 3`, `scheduler (dict of 8)`."""
    root = manifest.tree
    if not isinstance(root, Mapping):
        if not manifest.tensors:
            yield value_text(root)
        return
    held = {entry.path[0] for entry in manifest.tensors if entry.path}
    if is_module_state(root):
        held.update(_OF_EVERY_MODULE)
    for keys, child in children_of(root):
        if keys[0] in held or keys[0] in ("<args>", "<kwargs>", "<state>", "_metadata"):
            continue
        value = value_text(child)
        plain = child is None or isinstance(child, (bool, int, float, str))
        name = show_name(spell(keys))
        yield cut(f"{name} {value}" if plain else f"{name} ({value})", LONGEST_VALUE)


# -- the list ----------------------------------------------------------------------------------


def tensors(manifest: Manifest) -> Iterator[Block]:
    """Return a line for every tensor."""
    yield manifest.verdict
    head = "name", "section", "dtype", "shape", "device", "bytes", "storage", ""
    rows = [_tensor_row(entry, manifest) for entry in manifest.tensors]
    yield Table(rows, head, right=(5,))


def tensor_columns(manifest: Manifest) -> Columns:
    """Return every tensor, for a page that draws their bytes; shared bytes count once."""
    from ..display.columns import Columns, Drawing

    entries = manifest.tensors
    left = {key: each.nbytes for key, each in manifest.storages.items()}
    own = list[int]()
    for entry in entries:
        drawn = min(entry.nbytes, left.get(entry.storage or "", entry.nbytes))
        own.append(0 if entry.part_of else drawn)
        if entry.storage in left:
            left[entry.storage] -= own[-1]
    sizes = [entry.nbytes for entry in entries]
    files = [manifest.lies_in.get(entry.name, "") for entry in entries]
    several = bool(manifest.lies_in)
    return Columns(
        ("name", "section", "device", "dtype", "shape", "bytes", "", *["file"] * several),
        (
            [show_name(entry.name) for entry in entries],
            [str(entry.section) for entry in entries],
            [manifest.device_of(entry) for entry in entries],
            [entry.dtype for entry in entries],
            [shape(entry.shape) for entry in entries],
            sizes,
            ["; ".join(_remarks(entry, with_names=False)) for entry in entries],
            *[files] * several,
        ),
        right=(5,),
        what="tensors",
        drawn=Drawing(0, (1,), (2, 3, *[7] * several, 1), 5 if own == sizes else own),
    )


def _tensor_row(entry: TensorEntry, manifest: Manifest) -> tuple[str, ...]:
    division = manifest.divisions.get(entry.name)
    return (
        show_name(entry.name),
        str(entry.section),
        entry.dtype,
        shape(entry.shape),
        manifest.device_of(entry),
        size(entry.nbytes),
        entry.storage or "",
        "; ".join((*([division] if division else []), *_remarks(entry))),
    )


def _remarks(entry: TensorEntry, *, with_names: bool = True) -> Iterator[str]:
    if entry.layout not in ("strided", "storage"):
        yield entry.layout
    elif not _is_contiguous(entry):
        yield f"stride {shape(entry.stride)}"
    if entry.offset:
        yield f"offset {entry.offset}"
    if entry.kind != "tensor":
        yield entry.kind
    if entry.requires_grad:
        yield "requires grad"
    if entry.role is not None:
        yield str(entry.role)
    if entry.shared_with and not with_names:
        yield f"shared with {len(entry.shared_with):,} more"
    elif entry.shared_with:
        more = len(entry.shared_with) - 1
        first = show_name(entry.shared_with[0])
        yield f"shared with {first}" + (f" and {more} more" if more else "")


def _is_contiguous(entry: TensorEntry) -> bool:
    step = 1
    for n, stride in zip(reversed(entry.shape), reversed(entry.stride), strict=False):
        if n != 1 and stride != step:
            return False
        step *= max(n, 1)
    return True
