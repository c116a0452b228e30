"""Show a manifest as a summary, as a list of tensors, or as a tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ..manifest.manifest import Manifest, NamedDevice, TensorEntry
from ..manifest.other_records import RecordKind
from ..manifest.paths import Path, spell
from ..pickles.nodes import (
    Call,
    Dict,
    Global,
    List,
    Mapping,
    Node,
    Persistent,
    Set,
    Text,
    Tuple,
)
from ..sources.place import mask_secrets
from ..torch_pickle.children import children_of
from ..torch_pickle.sections.sections import is_module_state
from ..torch_pickle.tree import join_roots
from ..torch_pickle.values.tensors import device_text
from .display.blocks import Block, Columns, Drawing, PageBlock, Table
from .display.groups import groups_of
from .display.phrases import plural, short
from .display.text import cut, listed, shape, size
from .folder_files import files_of, shares_of

if TYPE_CHECKING:
    from typing_extensions import Self

#: What torch.nn.Module keeps in every module: torch/nn/modules/module.py, `__init__`.
_OF_EVERY_MODULE = {
    *("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook", "_forward_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks"),
    *("_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_backend"),
}
_LONGEST_NAME = 72  # characters of a tensor's name in a summary
_LONGEST_KEY = 200  # of a key in a tree, and of its own path in a summary
_LONGEST_VALUE = 60  # of a value in a tree
_MOST_VALUES = 10  # values that name a device
_MOST_ITEMS = 32  # of a list shown on one line
_TOTALS = "section", "device", "dtype", "tensors", "storages", "bytes"
_GROUPS = "tensor", "", "shape", "dtype", "device", "bytes", ""


@dataclass(frozen=True, repr=False, kw_only=True)
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
        yield from self._shown()
        yield from shares_of(self)
        if self.tensors:
            yield tensor_columns(self)


# -- the summary -------------------------------------------------------------------------------


def summary(manifest: Manifest, *, full: bool = False) -> Iterator[Block]:
    """The verdict, totals by section, device and dtype, the tensors by layer, and what else."""
    writer = f", written by {manifest.writer}" if manifest.writer else ""
    yield manifest.verdict
    path = cut(mask_secrets(manifest.path), None if full else _LONGEST_KEY)
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
        return listed(names, len(names) if full else _MOST_VALUES)

    besides = list(_besides(manifest))
    if besides:
        yield from ("", f"other values: {some(besides)}")
    if manifest.divisions:
        divided = Counter(manifest.divisions.values()).most_common()
        yield from ("", f"chunks: {some([f'{how} ×{n:,}' for how, n in divided])}")
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
    """Files in the checkpoint by name; for code and the like, their total."""
    for kind in RecordKind:
        held = [record for record in manifest.records if record.kind is kind]
        if full or kind is RecordKind.DATA:
            yield from (f"{each.name} ({kind}, {size(each.nbytes)})" for each in held)
        elif held and kind.is_content:
            yield f"{kind} ×{len(held):,} ({size(sum(each.nbytes for each in held))})"


def _named_devices(manifest: Manifest, full: bool) -> Iterator[Block]:
    """The user's own values that name a device; for a program, how often each is named."""
    own = [v for v in manifest.values_naming_devices if not v.follows]
    if own:
        title = "values that name a device (loading never changes these):"
        yield from named_devices(own, title, full=full)
    graph = [v for v in manifest.values_naming_devices if v.follows]
    if graph:
        counted = Counter(v.value for v in graph).most_common()
        counts = [f"{device} ×{n:,}" for device, n in counted]
        yield from ("", f"graph: {listed(counts)} (relocate changes these with the tensors)")
        yield Table(_device_rows(graph) if full else (), indent=2)


def named_devices(
    values: Sequence[NamedDevice], title: str, *, full: bool = False
) -> Iterator[Block]:
    """Values that name a device, under a title; of many the first, unless `full`."""
    shown = values if full else values[:_MOST_VALUES]
    yield from ("", title, Table(_device_rows(shown), indent=2))
    if len(shown) < len(values):
        yield f"  … {len(values) - len(shown):,} more"


def _device_rows(values: Sequence[NamedDevice]) -> list[tuple[str, str, str]]:
    return [(value.name, value.value, value.kind) for value in values]


def _besides(manifest: Manifest) -> Iterator[str]:
    """The top-level values beside the tensors: `epoch 3`, `scheduler (dict of 8)`."""
    root = manifest.tree
    if not isinstance(root, Mapping):
        if not manifest.tensors:
            yield _value(root)
        return
    held = {entry.path[0] for entry in manifest.tensors if entry.path}
    if is_module_state(root):
        held.update(_OF_EVERY_MODULE)
    for keys, child in children_of(root):
        if keys[0] in held or keys[0] in ("<args>", "<kwargs>", "<state>", "_metadata"):
            continue
        value = _value(child)
        plain = child is None or isinstance(child, (bool, int, float, str))
        yield cut(f"{spell(keys)} {value}" if plain else f"{spell(keys)} ({value})", _LONGEST_VALUE)


# -- the list ----------------------------------------------------------------------------------


def tensors(manifest: Manifest) -> Iterator[Block]:
    """Every tensor, a line each."""
    yield manifest.verdict
    head = "name", "section", "dtype", "shape", "device", "bytes", "storage", ""
    rows = [_tensor_row(entry, manifest) for entry in manifest.tensors]
    yield Table(rows, head, right=(5,))


def tensor_columns(manifest: Manifest) -> Columns:
    """Every tensor, for a page that draws their bytes; those that tensors share count once."""
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
            [entry.name for entry in entries],
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
        entry.name,
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
        yield f"shared with {entry.shared_with[0]}" + (f" and {more} more" if more else "")


def _is_contiguous(entry: TensorEntry) -> bool:
    step = 1
    for n, stride in zip(reversed(entry.shape), reversed(entry.stride), strict=False):
        if n != 1 and stride != step:
            return False
        step *= max(n, 1)
    return True


# -- the tree ----------------------------------------------------------------------------------


def tree(manifest: Manifest, select: Sequence[str] = ()) -> Iterator[str]:
    """The saved object, one line per value, with each container shown once.

    `select` has globs on names, or sections; only matches are shown, and what leads there.
    """
    lines = _tree_lines(manifest)
    if select:
        chosen: set[Path] = set()
        entries = {entry.path: entry for entry in manifest.tensors}
        for path, _ in lines:
            entry = entries.get(path)
            name, section = (entry.name, str(entry.section)) if entry else (spell(path), None)
            if section in select or any(fnmatchcase(name, glob) for glob in select):
                chosen.update(path[:depth] for depth in range(len(path) + 1))
        lines = [line for line in lines if line[0] in chosen]
    shown: set[Path] = set()
    for path, text in lines:
        depth = len(path) - 1
        while depth > 0 and path[:depth] not in shown:
            depth -= 1
        for n in range(depth + 1, len(path)):  # of several states, none has a line
            shown.add(path[:n])
            yield f"{_label(path[:n])}:"
        shown.add(path)
        yield f"{_label(path)}: {text}" if path else text
    for record in manifest.records:
        chosen_too = not select or any(fnmatchcase(record.name, glob) for glob in select)
        if chosen_too and (record.name,) not in shown:
            name = cut(record.name, _LONGEST_KEY)
            yield f"<{name}>: {record.kind}, {size(record.nbytes)}"


def _label(path: Path) -> str:
    return "  " * (len(path) - 1) + cut(spell(path[-1:]), _LONGEST_KEY)


def _tree_lines(manifest: Manifest) -> list[tuple[Path, str]]:
    """Path and text of each line; raw bytes have no node, but a line."""
    lines = list(_lines_of(manifest, manifest.tree))
    shown = {path for path, _ in lines}
    raw = [e.path for e in manifest.tensors if e.part_of is None and e.path not in shown]
    if not raw:
        return lines
    tree = join_roots([((), manifest.tree), *((path, None) for path in raw)])
    return list(_lines_of(manifest, tree))


def _lines_of(manifest: Manifest, root: Node) -> Iterator[tuple[Path, str]]:
    entries = {entry.path: entry for entry in manifest.tensors}
    attributes = _attributes_of_tensors(manifest)
    first: dict[int, Path] = {}
    todo: list[tuple[Node, Path]] = [(root, ())]
    while todo:
        node, path = todo.pop()
        entry = entries.get(path)
        before = first.setdefault(id(node), path) if _holds(node) else path
        if entry is not None:
            device = "" if manifest.is_untagged(entry) else f" {entry.device}"
            yield path, f"{entry.dtype}{shape(entry.shape)}{device}"
            if path in attributes:
                todo.extend(reversed(list(_shown_children(attributes.pop(path), path))))
        elif before is not path:
            yield path, f"(the same as {cut(spell(before), _LONGEST_KEY)})"
        elif id(node) in manifest.nested:
            roots = manifest.nested[id(node)]
            todo.extend((root, (*path, *keys)) for keys, root in reversed(roots))
        else:
            yield path, _value(node)
            todo.extend(reversed(list(_shown_children(node, path))))


def _attributes_of_tensors(manifest: Manifest) -> dict[Path, Node]:
    """Path of a tensor → tensors in its attributes, listed right after it."""
    found: dict[Path, list[tuple[Path, Node]]] = {}
    around: list[Path] = []
    for entry in manifest.tensors:
        while around and entry.path[: len(around[-1])] != around[-1]:
            around.pop()
        if around and entry.path != around[-1] and entry.part_of is None:
            found.setdefault(around[-1], []).append((entry.path[len(around[-1]) :], None))
        around.append(entry.path)
    return {path: join_roots(held) for path, held in found.items()}


def _holds(node: Node) -> bool:
    if isinstance(node, Tuple):
        return bool(node.items)
    return isinstance(node, (List, Dict, Set, Call))


def _shown_children(node: Node, path: Path) -> Iterator[tuple[Node, Path]]:
    """Children with their own lines; not a state dict's `_metadata`, nor lists of scalars."""
    if not isinstance(node, (Tuple, List, Set, Dict, Call)) or device_text(node) is not None:
        return
    if isinstance(node, (Tuple, List, Set)) and all(map(_is_scalar, node.items)):
        return
    for keys, child in children_of(node):
        if not (isinstance(node, Call) and keys == ("_metadata",) and _is_metadata(node, child)):
            yield child, (*path, *keys)


def _is_metadata(node: Call, child: Node) -> bool:
    """Whether this is torch's attribute of a state dict, not the user's key."""
    return isinstance(node.state, Dict) and node.state.get("_metadata") is child


def _is_scalar(node: Node) -> bool:
    return node is None or isinstance(node, (bool, int, float, str, bytes))


def _value(node: Node) -> str:
    if isinstance(node, Call):
        device = device_text(node)
        if device is not None:
            return f"torch.device({device!r})"
        name = (node.qualname or "object").removeprefix("collections.")
        return f"{name} of {len(node.pairs):,}" if node.pairs or name == "OrderedDict" else name
    if isinstance(node, Global):
        return node.qualname
    if isinstance(node, Persistent):
        return "storage"
    if isinstance(node, Dict):
        return f"dict of {len(node.pairs):,}"
    if isinstance(node, (Tuple, List, Set)):
        kind = f"{type(node).__name__.lower()} of {len(node.items):,}"
        if not node.items or not all(map(_is_scalar, node.items)):
            return kind
        items = ", ".join(map(_scalar, node.items[:_MOST_ITEMS]))
        return f"{kind}: {_start(items)}"
    return _scalar(node)


def _scalar(node: Node) -> str:
    if isinstance(node, int) and node.bit_length() > 1024:
        return _start(hex(node))
    if isinstance(node, Text):
        return _start(repr(str(node[: _LONGEST_VALUE + 1])))
    if isinstance(node, (str, bytes)):
        return _start(repr(node[: _LONGEST_VALUE + 1]))
    return str(node)


def _start(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
