"""safetensors: tensors by name, and nothing else.

    8 bytes   the length of the header
    header    JSON: name → dtype, shape, and where its bytes are; `__metadata__`: str → str
    the rest  the tensors, contiguous, each with bytes of its own

How a header is read is said in `headers`. Such a file says neither devices nor what shares memory:
each tensor has a storage of its own, named like it, on the CPU. Its tree is a dict of tensors, as
`torch.save` would spell them.

Written by the safetensors library in all its versions, and by what reimplements it. Source:
https://github.com/huggingface/safetensors, README.md (Format).
"""

from __future__ import annotations

from ..contents.streams import Container, Spelling
from ..contents.strided import MOST_DIMENSIONS
from ..drafts.canonical import Graph
from ..drafts.draft import Draft
from ..drafts.leaves import Reader
from ..drafts.trees import TREE, read_tree
from ..errors import UnsupportedError
from ..headers import LENGTH_NBYTES, read_header, shown
from ..manifest import Extent, Section, Storage
from ..plan import Plan
from ..source import Readable
from .base import Carries, Glimpse
from .checkpoint import PickledCheckpoint, PickledFormat
from .safetensors_writing import planned
from .writing import Manner, Writing

_SPACE = b" \t\n\r"  # that JSON may start with
#: What libraries say under `format`, and what they are for.
_WRITERS = {
    "pt": "PyTorch",
    "tf": "TensorFlow",
    "flax": "Flax",
    "mlx": "MLX",
    "np": "NumPy",
}


class SafetensorsFile(PickledFormat):
    """The format of the safetensors library."""

    name = "safetensors"
    suffixes: tuple[str, ...] = (".safetensors",)
    folder_stem = "model"
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

    def sniff(self, glimpse: Glimpse) -> bool:
        """A length comes first that the file has, and then the start of a JSON object."""
        length = int.from_bytes(glimpse.head[:LENGTH_NBYTES], "little")
        start = glimpse.head[LENGTH_NBYTES : LENGTH_NBYTES + length]
        fits = 0 < length <= glimpse.source.nbytes - LENGTH_NBYTES
        return fits and start.lstrip(_SPACE)[:1] in (b"{", b"")

    def read(self, glimpse: Glimpse) -> SafetensorsCheckpoint:
        """Read the header."""
        return SafetensorsCheckpoint(self.name, self.open(glimpse))

    def open(self, glimpse: Glimpse) -> SafetensorsContainer:
        """Read the header."""
        return SafetensorsContainer(glimpse)

    def plan_write(self, draft: Draft, manner: Manner) -> Writing:
        """How to write a draft as one file, or as several with an index.

        Raises:
            UnsupportedError: a name or the tree has no form in safetensors.
            RefusedError: bytes are shared and must not be, or the header would be too long.
        """
        return planned(draft, manner)


class SafetensorsCheckpoint(PickledCheckpoint):
    """What such a file holds."""

    def __init__(self, format: str, container: SafetensorsContainer) -> None:
        super().__init__(format, container)
        self._header = container

    def graph(self) -> Graph:
        """As `PickledCheckpoint.graph`."""
        return self._header.graph if self._header.is_canonical else super().graph()


class SafetensorsContainer(Container):
    """The tensors that a header names, and the tree that it tells of them, if it does.

    Attributes:
        header: what it says.
        graph: its nodes.
        is_canonical: whether these are sure to be in canonical form.
    """

    def __init__(self, glimpse: Glimpse) -> None:
        """Read the header.

        Raises:
            CorruptError, UnsupportedError: as `formats.read`.
        """
        super().__init__(glimpse.source)
        glimpse.opening.folder()
        self.header = read_header(self.source)
        for name, entry in self.header.entries.items():
            if len(entry.shape) > MOST_DIMENSIONS:
                raise UnsupportedError(
                    f"the tensor {shown(name)} has {len(entry.shape)} dimensions"
                )
        reader, root = read_tree(self.header.entries, self.header.metadata.get(TREE), self.warnings)
        self.section = Section.OTHER if reader.terms else Section.MODEL
        self.roots = [((), root)]
        self.graph = reader.graph
        self.ids = reader.graph.ids
        self.is_canonical = not reader.terms  # terms may say anything
        self.blobs = {known: self._window(name) for known, name in reader.blobs.items()}
        self.storages = {name: self._storage(reader, name) for name in reader.graph.storages}
        made_for = _WRITERS.get(self.header.metadata.get("format", ""))
        self.writer = (
            "ckptmove" if reader.terms else f"a library for {made_for}" if made_for else ""
        )

    @property
    def described_nbytes(self) -> int:
        """The length of the header."""
        return self.header.data_at

    def _window(self, name: str) -> Readable:
        entry = self.header.entries[name]
        return self.source.window(entry.start, entry.nbytes)

    def _storage(self, reader: Reader, name: str) -> Storage:
        entry, said = self.header.entries[name], reader.graph.ids[id(reader.graph.storages[name])]
        extent = None
        if self.source.start is not None:
            extent = Extent(self.source.start + entry.start, entry.nbytes)
        return Storage(name, str(said.location), entry.nbytes, said.dtype, extent)

    def plan(self, spelling: Spelling) -> Plan:
        """Never: there is no device to spell.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "safetensors carry no devices",
            hint="ckptmove convert --to gives a checkpoint that does",
        )
