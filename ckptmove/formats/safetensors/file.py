"""safetensors: tensors by name, and nothing else.

`header` shows the layout. Such a file names no devices and no shared memory: each tensor has its
own storage, with the same name, on the CPU. Its tree is a dict of tensors, as `torch.save` would
write them. Written by the safetensors library in all its versions, and by other implementations.

Source: https://github.com/huggingface/safetensors, README.md (Format).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ...errors import UnsupportedError
from ...graph.array_order import Latest, ReorderedArray
from ...graph.tensor_terms import TermReader
from ...graph.tree_text import TREE, read_tree
from ...manifest.dtypes import CARRIERS
from ...manifest.manifest import Extent, Role, Section, Storage
from ...manifest.paths import Path
from ...pickles.nodes import Node
from ...sources.source import Readable
from ...torch_pickle.streams import Container, LocationEdits
from ...torch_pickle.values.persistent_ids import StorageId
from ...torch_pickle.values.strided import MOST_DIMENSIONS
from ..base import PickledFormat, WritableFormat, runs_nothing
from ..checkpoint import Carries, Checkpoint
from ..probe import Probe
from .header import LENGTH_NBYTES, HeaderEntry, quote, read_header
from .metadata import other_names

if TYPE_CHECKING:
    from ...graph.array_order import Order
    from ...graph.canonical import Graph
    from ...graph.draft import CheckpointGraph
    from ...plans.plan import Plan
    from ...reports.convert import Loss
    from ..writing import WriteOptions, WritePlan

#: The metadata key under which torch.distributed.checkpoint stores which part of each tensor a file
#: holds.
SHARDING = "DCP_SHARDING_INFO"
_SPACE = b" \t\n\r"  # JSON may start with these
#: Values of `format` that libraries write, and the framework each stands for.
_WRITERS = {
    "pt": "PyTorch",
    "tf": "TensorFlow",
    "flax": "Flax",
    "mlx": "MLX",
    "np": "NumPy",
}


class SafetensorsFile(PickledFormat, WritableFormat):
    """The format of the safetensors library."""

    name = "safetensors"
    suffixes = (".safetensors",)
    folder_stem = "model"
    shards = True
    annotates = True
    summary = "safetensors and the libraries that save with it: transformers, diffusers, …"
    refused = (
        "to relocate it, since it carries no devices; headers that say something twice; `F6_E2M3` "
        "and `F6_E3M2`, which torch lacks"
    )
    carries = Carries(
        devices=False,
        aliases=False,
        strides=False,
        objects=False,
        dtypes="all of torch but complex128, complex32, quantized and bits",
    )

    def sniff(self, probe: Probe) -> bool:
        """Whether it starts with a length that fits the file, and then a JSON object."""
        length = int.from_bytes(probe.head[:LENGTH_NBYTES], "little")
        start = probe.head[LENGTH_NBYTES : LENGTH_NBYTES + length]
        fits = 0 < length <= probe.source.nbytes - LENGTH_NBYTES
        return fits and start.lstrip(_SPACE)[:1] in (b"{", b"") and runs_nothing(probe)

    def read(self, probe: Probe) -> TensorsCheckpoint:
        """Read the header."""
        return TensorsCheckpoint(self.name, self.open(probe), self.carries)

    def open(self, probe: Probe) -> SafetensorsContainer:
        """Read the header."""
        return SafetensorsContainer(probe)

    def losses(self, draft: CheckpointGraph, options: WriteOptions) -> list[Loss]:
        """Without the tree (`bare`): the tensors that only the tree can express. Otherwise none."""
        if not options.bare:
            return []
        from ...reports.convert import Loss

        losses = []
        for entry in draft.list_contents().tensors:
            what = entry.dtype if entry.layout == "strided" else entry.layout
            if entry.part_of is None and (what in CARRIERS or what == entry.layout):
                losses.append(Loss(entry.name, f"is {what}, which only the tree can express"))
        return losses

    def plan_write(self, draft: CheckpointGraph, options: WriteOptions) -> WritePlan:
        from .writing import plan_write

        return plan_write(draft, options)


class TensorInFile(NamedTuple):
    """A tensor, with the file that holds it."""

    entry: HeaderEntry  #: its entry in the header
    file: Readable
    source: int = 0  #: the number of that file, if there are several


class TensorsCheckpoint(Checkpoint):
    """A checkpoint of tensors by name."""

    container: TensorsContainer

    def plain(self) -> Mapping[str, TensorInFile] | None:
        """Each tensor by name; None if there is more than tensors."""
        return self.container.placed if self.container.is_flat else None

    def graph(self, *, nested: bool = False, program: bool = False) -> Graph:
        if self.container.is_canonical:
            return self.container.graph
        return super().graph(nested=nested, program=program)


class TensorsContainer(Container):
    """Tensors by name, and their tree if the metadata has one."""

    inert = True
    stores_devices = False

    def __init__(
        self,
        source: Readable,
        placed: Mapping[str, TensorInFile],
        tree: str | None,
        described: int,
        metadata: Mapping[str, str],
        folder: str = "",
    ) -> None:
        """`source` names the tensors in its `described` bytes.

        `tree` is the stored text of their tree. `folder`: the prefix of the ids of its storages.
        """
        super().__init__(source)
        self.folder = folder
        for name, (entry, _, _) in placed.items():
            if len(entry.shape) > MOST_DIMENSIONS:
                raise UnsupportedError(
                    f"the tensor {quote(name)} has {len(entry.shape)} dimensions"
                )
        self.metadata = dict(metadata)
        self.placed = placed  #: each tensor, by name
        self._described = described
        self._tree, self._others = tree, other_names(placed, self.metadata)
        for name in ("roots", "ids", "storages", "blobs"):
            # created at the first access, since `load` usually needs none of them
            delattr(self, name)
        told = tree is not None and self._reader.terms
        self.section = Section.OTHER if told else Section.MODEL
        self.has_tree = told
        #: whether each tensor has one name and there is nothing else
        self.is_flat = not told and not self._others
        self.writer = "ckptmove" if told else ""
        self.tags_storages = told

    @cached_property
    def _reader(self) -> TermReader:
        """The reader of its tree; raises the same errors as `read_tree`."""
        entries = {name: each.entry for name, each in self.placed.items()}
        return read_tree(entries, self._tree, self.warnings, self._others, self.folder)[0]

    @property
    def is_canonical(self) -> bool:
        """Whether its nodes are surely in canonical form; the terms of a tree may build any."""
        return not self._reader.composed

    @property
    def graph(self) -> Graph:
        """The graph of its nodes."""
        return self._reader.graph

    @cached_property
    def roots(self) -> list[tuple[Path, Node]]:  # type: ignore[override] # it can be set
        """Like in any container, but created at the first access."""
        return [((), self.graph.root)]

    @cached_property
    def ids(self) -> dict[int, StorageId]:  # type: ignore[override] # it can be set
        """See `roots`."""
        return self.graph.ids

    @cached_property
    def storages(self) -> dict[str, Storage]:  # type: ignore[override] # it can be set
        """See `roots`."""
        return {key: self._storage(self._reader, key) for key in self.graph.storages}

    @cached_property
    def blobs(self) -> dict[int, Readable]:  # type: ignore[override] # it can be set
        """See `roots`."""
        latest = Latest()
        return {known: self._bytes(*held, latest) for known, held in self._reader.blobs.items()}

    def role_at(self, path: Path) -> Role | None:
        return None if self.has_tree else Role.UNTAGGED

    @property
    def described_nbytes(self) -> int:
        """The size of the header, or of all headers together."""
        return self._described

    def unknown_callables(self) -> Iterator[str]:
        """The callables in its tree: loading it runs nothing, but a pickle made from it would."""
        if self.has_tree:
            from ...graph.edit.callables import callables_in, unlisted_callable

            yield from callables_in(self.graph.root, unlisted_callable)

    def _bytes(self, name: str, order: Order | None, latest: Latest) -> Readable:
        entry, file, _ = self.placed[name]
        window = file.window(entry.start, entry.nbytes)
        return window if order is None else ReorderedArray(window, order, latest)

    def _storage(self, reader: TermReader, key: str) -> Storage:
        entry, file, source = self.placed[key.removeprefix(self.folder)]
        said = reader.graph.ids[id(reader.graph.storages[key])]
        extent = None
        if file.start is not None:
            extent = tuple.__new__(Extent, (file.start + entry.start, entry.nbytes, source))
        fields = key, str(said.location), entry.nbytes, said.dtype, extent
        return tuple.__new__(Storage, fields)

    def plan(self, spelling: LocationEdits) -> Plan:
        raise UnsupportedError(
            "safetensors files store no devices",
            hint="ckptmove convert --to writes a .pt file with devices",
        )


class SafetensorsContainer(TensorsContainer):
    """The tensors of one file."""

    def __init__(self, probe: Probe) -> None:
        """Read the header."""
        folder = probe.session.folder()
        source = probe.source
        self.header = read_header(source)
        if SHARDING in self.header.metadata:
            raise UnsupportedError(
                "holds parts of tensors: one rank's file of a distributed checkpoint",
                hint="give the folder that it is in",
            )
        placed = {name: TensorInFile(entry, source) for name, entry in self.header.entries.items()}
        said, own = self.header.metadata, ("format", TREE)
        besides = {key: text for key, text in said.items() if key not in own}
        tree, described = said.get(TREE), self.header.data_at
        super().__init__(source, placed, tree, described, besides, folder)
        made_for = _WRITERS.get(self.header.metadata.get("format", ""))
        self.writer = self.writer or (f"a library for {made_for}" if made_for else "")
