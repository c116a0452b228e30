"""pickle: objects with tensors in a plain pickle (`pickle.dump(model, file)`).

A plain pickler does not know storages: each becomes a call of `torch.storage._load_from_bytes`,
whose argument is a whole torch-legacy file, including its tag. `map_location` does not affect these
tags (https://github.com/pytorch/pytorch/issues/16797), so such a file can be loaded only where all
its devices are available. Libraries also keep bytes from `torch.save` or `pickle.dumps` in their
attributes. Relocating changes the tags in these bytes, and the lengths around them if necessary.

Bytes are `BINBYTES` since protocol 3, in frames since 4. In protocols 0 to 2 they are text that
`_codecs.encode` turns into bytes, or strings of Python 2. A file may hold several pickles, one
after the other.

Sources: torch/storage.py (`TypedStorage.__reduce__`, `_load_from_bytes`); CPython's Lib/pickle.py
(`save_bytes`); Lib/pickletools.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import CorruptError, InputError, UnsupportedError
from ..pickles.nodes import Node
from ..pickles.reached_globals import names_reached
from ..sources.budget import MOST_PICKLES, Excess
from ..torch_pickle.callables.uses import not_surely_harmless
from ..torch_pickle.streams import Container
from .base import PickledFormat, bytes_behind
from .checkpoint import Carries
from .probe import Probe

PROTO = b"\x80"  #: the first byte of all pickles since protocol 2
_TEXTUAL = frozenset(b"(c]}lditIFLVSN")  # first bytes of pickles of protocols 0 and 1


class PlainPickle(PickledFormat):
    """The format of `pickle.dump`."""

    name = "pickle"
    suffixes = (".pkl", ".pickle", ".p")
    vague = True
    summary = "pickle.dump of anything that holds tensors"
    refused = "pickles that keep buffers or objects outside of the file, since they are not there"
    carries = Carries(devices=True, aliases=True, strides=True, objects=True, dtypes="all of torch")

    def sniff(self, probe: Probe) -> bool:
        """Whether it starts with PROTO; or with an older opcode, and the file ends with STOP."""
        head, source = probe.head, probe.source
        if head[:1] == PROTO:
            return len(head) > 1 and head[1] <= 5
        if not head or head[0] not in _TEXTUAL or source.read(source.nbytes - 1, 1) != b".":
            return False
        try:
            with probe.session.budget.without_counting():
                root = probe.session.stream(source).pickle.root
        except Excess:
            return True  # `open` says so
        except InputError:
            return False
        return not isinstance(root, (str, int, float))

    def open(self, probe: Probe) -> PickleContainer:
        """Read the pickles."""
        return PickleContainer(probe)


class PickleContainer(Container):
    """One or more pickles, one after the other."""

    def __init__(self, probe: Probe) -> None:
        """Read the pickles."""
        super().__init__(probe.source)
        probe.session.folder()
        self.reached: list[str] = []  # names that unpickling the bytes behind the end would import
        at = 0
        roots: list[Node] = []
        while at < self.source.nbytes:
            if roots and not probe.session.budget.follow():
                raise UnsupportedError(f"it holds more than {MOST_PICKLES:,} pickles")
            try:
                stream = probe.session.stream(self.source, at)
            except CorruptError as error:
                if isinstance(error, Excess) or not roots or self._says_so(at):
                    raise
                rest = self.source.nbytes - at
                self.warnings.append(bytes_behind(rest, "the end of the pickle"))
                self.reached = names_reached(self.source, probe.session.budget, at)
                break
            if stream.pickle.persistents:
                raise UnsupportedError("its pickle refers to objects outside the file")
            self.streams.append(stream)
            roots.append(stream.pickle.root)
            at += stream.nbytes
        self.roots = [((n,) if len(roots) > 1 else (), root) for n, root in enumerate(roots)]
        self.writer = self._writer()

    def unknown_callables(self) -> Iterator[str]:
        yield from super().unknown_callables()
        yield from not_surely_harmless(self.reached)

    def _says_so(self, at: int) -> bool:
        """Whether the bytes that follow start with PROTO, as all pickles since protocol 2 do."""
        head = self.source.read(at, min(2, self.source.nbytes - at))
        return len(head) == 2 and head[:1] == PROTO and head[1] <= 5

    def _writer(self) -> str:
        pickles = [stream.pickle for stream in self.streams]
        python = "Python 2" if any(each.python2 for each in pickles) else "Python"
        return f"{python}, pickle protocol {max(each.protocol for each in pickles)}"
