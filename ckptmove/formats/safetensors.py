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

from ..contents.pids import StorageId
from ..contents.streams import Container, Spelling
from ..contents.strided import MOST_DIMENSIONS, contiguous_stride
from ..dtypes import STORAGE_CLASSES, storage_element_nbytes
from ..errors import UnsupportedError
from ..headers import LENGTH_NBYTES, Entry, Header, read_header, shown
from ..manifest import Extent, Section, Storage
from ..pickles.nodes import Call, Dict, Global, Node, Persistent, Text, Tuple
from ..plan import Plan
from .base import Carries, Glimpse
from .checkpoint import PickledFormat

_SPACE = b" \t\n\r"  # that JSON may start with
_LOCATION = "cpu"
_CLASSES = {dtype: name for name, dtype in STORAGE_CLASSES.items()}
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

    def open(self, glimpse: Glimpse) -> SafetensorsContainer:
        """Read the header."""
        return SafetensorsContainer(glimpse)


class SafetensorsContainer(Container):
    """The tensors that a header names.

    Attributes:
        header: what it says.
    """

    section = Section.MODEL

    def __init__(self, glimpse: Glimpse) -> None:
        """Read the header.

        Raises:
            CorruptError, UnsupportedError: as `formats.read`.
        """
        super().__init__(glimpse.source)
        glimpse.opening.folder()
        self.header = read_header(self.source)
        self.roots = [((), self._root(self.header))]
        made_for = _WRITERS.get(self.header.metadata.get("format", ""))
        self.writer = f"a library for {made_for}" if made_for else ""

    @property
    def described_nbytes(self) -> int:
        """The length of the header."""
        return self.header.data_at

    def _root(self, header: Header) -> Node:
        """What was saved: a dict of the tensors, in the order of the header."""
        root = Dict()
        root.pairs = [(Text(name, 0), self._tensor(each)) for name, each in header.entries.items()]
        return root

    def _tensor(self, entry: Entry) -> Call:
        """A tensor as a pickle would rebuild it, all of a storage of its own; that is noted."""
        name, dtype, shape, start, nbytes = entry
        if len(shape) > MOST_DIMENSIONS:
            raise UnsupportedError(f"the tensor {shown(name)} has {len(shape)} dimensions")
        cls = _CLASSES.get(dtype)
        typed = None if cls is None else dtype
        location = Text(_LOCATION, 0)
        count = nbytes if typed is None else nbytes // storage_element_nbytes(typed)
        pid: list[Node] = [
            Text("storage", 0),
            Global("torch", cls or "UntypedStorage", 0),
            Text(name, 0),
            location,
            count,
        ]
        storage = Persistent(Tuple(pid, 0), 0)
        extent = None if self.source.start is None else Extent(self.source.start + start, nbytes)
        self.ids[id(storage)] = StorageId(name, name, location, typed, nbytes, nbytes)
        self.storages[name] = Storage(name, _LOCATION, nbytes, typed, extent)
        sizes, strides = Tuple([*shape], 0), Tuple([*contiguous_stride(shape)], 0)
        hooks = Call(Global("collections", "OrderedDict", 0), Tuple([], 0), "REDUCE", 0)
        args: list[Node] = [storage, 0, sizes, strides, False, hooks]
        if typed is None:
            args.append(Global("torch", dtype, 0))
        rebuild = "_rebuild_tensor_v3" if typed is None else "_rebuild_tensor_v2"
        return Call(Global("torch._utils", rebuild, 0), Tuple(args, 0), "REDUCE", 0)

    def plan(self, spelling: Spelling) -> Plan:
        """Never: there is no device to spell.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "safetensors carry no devices",
            hint="ckptmove convert --to gives a checkpoint that does",
        )
