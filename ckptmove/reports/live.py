"""Show the manifest of a model in memory: totals, modules by device, warnings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Annotated

from ..display.blocks import Block, Table
from ..display.plain import OMITTED
from ..display.text import cut, size
from ..manifest.manifest import Manifest, Role, Section, TensorEntry
from ..manifest.paths import Key, spell
from .groups import collapse_names, pattern_of
from .inspect import FileManifest, named_devices

_MOST_LINES = 40
_LONGEST_NAME = 60  # characters
_TOTALS = "section", "held as", "device", "dtype", "tensors", "storages", "bytes"
_PLACES = "module", "device", "tensors", "bytes", ""


@dataclass(frozen=True, repr=False, kw_only=True)
class LiveManifest(FileManifest):
    """The manifest of a model in memory, as `report` returns it.

    Attributes:
        inputs: where the inputs of the model should go, in words.
    """

    inputs: Annotated[str, OMITTED] = ""

    def blocks(self, *, full: bool = False) -> Iterator[Block]:
        """Show totals, the modules by device, and attributes that name one."""
        yield self.verdict
        yield f"{self.path}: {self.format}, {size(self.nbytes)}"
        if self.inputs:
            yield self.inputs
        if self.tensors:
            yield from ("", Table(list(_total_rows(self)), _TOTALS, right=(4, 5, 6)))
        placed = list(places(self))
        yield from ("", *placed) if placed else ()
        if self.values_naming_devices:
            title = "attributes that name a device (Module.to does not change these):"
            yield from named_devices(self.values_naming_devices, title)


def places(manifest: Manifest) -> Iterator[Block]:
    """Return the modules of a model by device, repeated layers as one; empty without tensors."""
    lines = _placement(manifest)
    shown = lines[:_MOST_LINES]
    if lines:
        yield Table([each.row() for each in shown], _PLACES, right=(2, 3))
    if len(shown) < len(lines):
        yield f"… {len(lines) - len(shown):,} more"


def _total_rows(manifest: Manifest) -> Iterator[tuple[str, ...]]:
    totals = manifest.totals(lambda e: (str(e.section), e.held or "", e.device, e.dtype))
    held_as = dict.fromkeys(("parameter", *(e.held or "" for e in manifest.tensors)))
    order = {name: n for n, name in enumerate((*map(str, Section), *held_as))}
    rows = sorted(totals.items(), key=lambda item: (order[item[0][0]], order[item[0][1]]))
    before: tuple[str, str] = "", ""
    for (section, held, device, dtype), total in rows:
        counts = f"{total.tensors:,}", f"{total.storages:,}", size(total.nbytes)
        shown = "" if section == before[0] else section, "" if (section, held) == before else held
        yield (*shown, device, dtype, *counts)
        before = section, held


# -- placement by module -----------------------------------------------------------------------


@dataclass
class _Node:
    """A module, or a tensor in one."""

    name: str = ""  #: dotted
    devices: dict[str, None] = field(default_factory=dict)  #: of its tensors, also tied ones
    numbered: bool = False  #: whether it contains repeated layers
    children: dict[Key, _Node] = field(default_factory=dict)  #: by key
    tensors: int = 0  #: the number of tensors; tied ones count once
    nbytes: int = 0  #: bytes of storages that no earlier node has
    #: earlier tensors that its tensors are tied to
    tied: list[str] = field(default_factory=list)

    def child(self, key: Key) -> _Node:
        found = self.children.get(key)
        if found is None:
            name = f"{self.name}.{spell((key,))}" if self.name else spell((key,))
            found = self.children[key] = _Node(name)
        return found


@dataclass
class _Line:
    """Nodes shown as one line."""

    nodes: list[_Node]

    def row(self) -> tuple[str, str, str, str, str]:
        """Return name, device, tensors, bytes, and tied names."""
        name = collapse_names(each.name for each in self.nodes)
        tensors = sum(each.tensors for each in self.nodes)
        names = {each.name for each in self.nodes}
        others = dict.fromkeys(other for each in self.nodes for other in each.tied)
        tied = [other for other in others if not _is_within(other, names)]
        more = f" and {len(tied) - 1:,} more" if len(tied) > 1 else ""
        remark = f"tied to {cut(tied[0], _LONGEST_NAME)}{more}" if tied else ""
        device = ", ".join(self.nodes[0].devices)
        counted = f"{tensors:,}", size(sum(each.nbytes for each in self.nodes))
        return (cut(name, _LONGEST_NAME), device, *(counted if tensors else ("", "")), remark)


def _placement(manifest: Manifest) -> list[_Line]:
    """Return the largest modules that are on one device, with repeated layers as one."""
    root = _tree(manifest)
    while len(root.children) == 1:  # a wrapper
        (only,) = root.children.values()
        if not any(each.children for each in only.children.values()):
            break
        root = only
    lines: dict[tuple[object, ...], _Line] = {}
    todo = [(key, each, False) for key, each in reversed(root.children.items())]
    while todo:
        key, node, in_layer = todo.pop()
        in_layer = in_layer or _is_number(key)
        if node.children and (len(node.devices) > 1 or (node.numbered and not in_layer)):
            todo += [(key, each, in_layer) for key, each in reversed(node.children.items())]
            continue
        parts, _ = pattern_of(node.name)
        label = (parts, tuple(node.devices), bool(node.tensors))
        lines.setdefault(label, _Line([])).nodes.append(node)
    return list(lines.values())


def _tree(manifest: Manifest) -> _Node:
    root = _Node()
    seen: set[str] = set()
    ties = _Ties()
    for entry in _model_tensors(manifest.tensors):
        nbytes = 0
        if entry.storage is not None and entry.storage not in seen:
            seen.add(entry.storage)
            nbytes = manifest.storages[entry.storage].nbytes
        tied = ties.of(entry) if entry.part_of is None else None
        counted = entry.part_of is None and tied is None
        last_number = max((n for n, key in enumerate(entry.path) if _is_number(key)), default=-1)
        node: _Node | None = None
        for n in range(len(entry.path) + 1):
            node = root if node is None else node.child(entry.path[n - 1])
            node.devices[entry.device] = None
            node.tensors += counted
            node.nbytes += nbytes
            node.numbered = node.numbered or last_number >= n
            if tied is not None:
                node.tied.append(tied)
    return root


def _model_tensors(entries: Iterable[TensorEntry]) -> Iterator[TensorEntry]:
    """Return tensors of modules; gradients are with their parameter, unless a warning says so."""
    for entry in entries:
        model = entry.section is Section.MODEL and entry.held != "gradient"
        if model and entry.role is not Role.SHAPE:
            yield entry


class _Ties:
    """Finds tensors that are the same as an earlier one."""

    def __init__(self) -> None:
        self._groups: dict[str, str] = {}  # name → the first name of the tensors that share bytes
        self._first: dict[tuple[object, ...], str] = {}

    def of(self, entry: TensorEntry) -> str | None:
        """Return the earlier name of the same tensor, if any."""
        if not entry.shared_with:
            return None
        group = self._groups.get(entry.shared_with[0], entry.name)
        self._groups[entry.name] = group
        place = (entry.storage or group, entry.offset, entry.shape, entry.stride)
        first = self._first.setdefault(place, entry.name)
        return None if first == entry.name else first


def _is_within(name: str, modules: Set[str]) -> bool:
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return bool(name)


def _is_number(key: Key) -> bool:
    return isinstance(key, int) or (isinstance(key, str) and key.isdecimal())
