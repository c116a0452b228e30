"""The pickles of a checkpoint, including those nested in bytes of other pickles.

A plainly pickled model holds each tensor as bytes that `torch.save` wrote
(`torch.storage._load_from_bytes`), and some libraries keep whole checkpoints in bytes. So a stream
may hold containers, which hold streams. The nodes of each stream have offsets from a separate base,
so that an offset shows which stream it belongs to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from ..errors import CorruptError, UnsupportedError
from ..manifest.manifest import Role, Section, Storage, TensorEntry
from ..manifest.other_records import Chunk, HeldRecord, NamedDevice
from ..manifest.paths import Path
from ..pickles.nodes import Blob, Call, Global, Node, Text
from ..pickles.opcodes.literals import may_be_checkpoint
from ..pickles.scan import Survey, count_nbytes
from ..pickles.walk import walk_at
from ..sources.budget import Budget
from ..sources.source import Memory, Readable
from .callables.allowlist import KNOWN
from .callables.uses import ENCODE, Uses, bytes_as_text, latin_1, not_surely_harmless
from .values.persistent_ids import StorageId, TensorId

if TYPE_CHECKING:  # and below, where it is used: what only a change of devices needs
    from ..pickles.replacements import Replacements
    from ..pickles.splice import Respelling
    from ..plans.plan import Edit, Plan, Proof
    from .torchscript_code import Literal

_SPAN = 1 << 40  # the distance between the bases of two streams
_NEAR = 4096  # changes that are closer than so many bytes are written as one


class LocationEdits:
    """The devices that nodes of a checkpoint will spell instead."""

    def __init__(self) -> None:
        #: `id()` of a `torch.device` call → its new device
        self.devices: dict[int, str] = {}
        #: strings in code, and their new devices
        self.literals: list[tuple[Literal, str]] = []
        #: base of a stream → its last changes, if they only replace strings
        self.respellings: dict[int, tuple[Replacements, Mapping[int, str]]] = {}
        self._plans: dict[int, Plan] = {}
        # by the number of a stream: offset in it of a use of a string → the new string; calls
        self._texts: dict[int, dict[int, str]] = defaultdict(dict)
        self._calls: dict[int, list[Call]] = defaultdict(list)

    def spell(self, node: Text | Call | Literal, device: str) -> None:
        """Make a string, or a `torch.device`, name another device."""
        if isinstance(node, Text):
            number, at = divmod(node.at, _SPAN)
            self._texts[number][at] = device
        elif isinstance(node, Call):
            self.devices[id(node)] = device
            self._calls[node.at // _SPAN].append(node)
        else:
            self.literals.append((node, device))

    def texts_of(self, stream: PickleStream) -> dict[int, str]:
        """The offsets of nodes that are strings to change in a stream → the new strings."""
        return {stream.base + at: new for at, new in self._texts[stream.base // _SPAN].items()}

    def plan_of(self, container: Container) -> Plan:
        """The plan to write a container with this spelling; it is computed once."""
        if id(container) not in self._plans:
            self._plans[id(container)] = container.plan(self)
        return self._plans[id(container)]

    def of(self, stream: PickleStream) -> Respelling:
        """The changes within one stream."""
        from ..pickles.splice import Respelling

        number = stream.base // _SPAN
        texts, calls = self._texts[number], self._calls[number]
        texts = texts.copy() if calls else texts  # calls add to them
        respelling = Respelling(stream.base, texts, python2=stream.pickle.python2)
        for call in calls:
            respelling.device(stream.data, call, self.devices[id(call)])
        return respelling


class Container:
    """A file, or bytes within a file, with pickles and the storages that they name."""

    #: the section of its tensors, unless something else determines it
    section = Section.OTHER
    #: what else it holds that is not part of the graph of nodes, in a few words
    beside = ""
    #: whether it is a program; the graph then shows only the data
    program = False
    #: the name below which the graph shows compiled code
    bytecode = ""
    #: whether the elements of its storages are big-endian
    big_endian = False
    #: whether loaders of its format never run anything that it names
    inert = False
    #: whether it stores the devices of its tensors
    stores_devices = True
    #: whether its own storages carry device tags
    tags_storages = True

    def __init__(self, source: Readable) -> None:
        self.source = source
        #: its pickles, without those nested in them
        self.streams: list[PickleStream] = []
        #: the saved objects, each with the path under which it is shown
        self.roots: list[tuple[Path, Node]] = []
        #: `id()` of the node of a persistent id → the storage that it names
        self.ids: dict[int, StorageId] = {}
        #: `id()` of the node of a persistent id → the tensor that it names
        self.tensors: dict[int, TensorId] = {}
        self.storages: MutableMapping[str, Storage] = {}
        #: devices that are named outside its pickles, and where
        self.named: list[tuple[NamedDevice, Literal]] = []
        #: `id()` of bytes in the saved objects that are not held in memory → their source
        self.blobs: dict[int, Readable] = {}
        self.metadata: dict[str, str] = {}
        self.warnings: list[str] = []
        #: the device meshes on which its tensors were divided, if known: `2×4 (dp, tp)`
        self.mesh_shapes: list[str] = []
        #: what is known about the program that wrote it
        self.writer = ""

    def section_at(self, path: Path) -> Section:
        """The section of the tensors below a root, unless something else determines it."""
        return self.section

    def role_at(self, path: Path) -> Role | None:
        """The role of the tensors below a root, unless something else determines it."""
        return None

    @property
    def nbytes(self) -> int:
        """The size of all its files together."""
        return self.source.nbytes

    @property
    def described_nbytes(self) -> int:
        """The size of the data that describes its contents: its pickles."""
        return sum(len(stream.data) for stream in self.streams)

    def plan(self, spelling: LocationEdits) -> Plan:
        """The plan to write it with another spelling: as a patch, if its length can be kept."""
        from ..plans.plan import apply_edits

        return apply_edits(self.source.start or 0, self.source.nbytes, self.changes(spelling))

    def changes(self, spelling: LocationEdits) -> list[Edit]:
        """The changes of the source for this spelling; each pickle keeps its length if possible."""
        for exact in (True, False):
            found = [stream.edits(spelling, exact=exact) for stream in self.streams]
            changes = [edit for each in found if each is not None for edit in each]
            if None not in found:
                break
        return changes

    def patched_pickles(self, written: Readable) -> Sequence[Readable] | None:
        """Its pickles in a copy of the container that differs only in them.

        None if more may differ, or if that can't be checked without opening the copy as a
        checkpoint.
        """
        return None

    def content(self, storage: str) -> bytes:
        """The bytes of a storage that are not stored in the file as is."""
        raise CorruptError(f"the storage {storage!r} can't be read")

    def damage(self, report: Callable[[int], object]) -> Iterator[str]:
        """The damage that the container's own checksums show, one sentence each.

        `report` is called with how many bytes were read since its last call.
        """
        return iter(())

    def crc32(self, storage: str) -> int:
        """The checksum of a storage's bytes, if the file has one; 0 if not."""
        return 0

    def proofs(self, storage: str) -> Sequence[Proof]:
        """The checksums of parts of a storage's bytes, if it consists of parts."""
        return ()

    def divisions(self, tensors: Sequence[TensorEntry]) -> dict[str, str]:
        """Name of each divided tensor → how it is divided into chunks."""
        return {}

    def tags(self) -> dict[str, tuple[str, ...]]:
        """Storage id → devices named in the rank files that the storage was assembled from."""
        return {}

    def chunks(self, tensors: Sequence[TensorEntry]) -> Iterator[Chunk]:
        """The chunks of divided tensors, in the order of `tensors`."""
        return iter(())

    def is_known(self, name: Global) -> bool:
        """Whether an imported name is known to be harmless when it is used correctly."""
        return name.qualname in KNOWN and "." not in name.name

    def unknown_callables(self) -> Iterator[str]:
        """The names that loading it would import and that are not known to be harmless.

        A name may occur several times. Names in nested containers are not included.
        """
        for stream in self.streams:
            loaded = {id(nested.maker) for nested in stream.nested}
            yield from Uses(loaded).unknown(stream.pickle, self.is_known)
            reached = list(not_surely_harmless(stream.reached))
            yield from reached or ["(in bytes that can't be read)"] * bool(stream.unread)

    def records(self) -> Iterator[HeldRecord]:
        """Its other contents, besides pickles and storages."""
        return iter(())

    def frame(self, spelling: LocationEdits | None = None) -> object:
        """The data besides pickles and storages, as it is or, with a spelling, as it will be."""
        return None

    def inner(self) -> Iterator[tuple[str, Container]]:
        """The containers directly inside it, each with a name."""
        nested = [each.container for stream in self.streams for each in stream.nested]
        return ((f"bytes.{n}", each) for n, each in enumerate(nested))

    def everything(self) -> Iterator[Container]:
        """This container and all containers nested in it, at any depth."""
        todo, met = [self], set[int]()
        while todo:
            container = todo.pop()
            if id(container) in met:
                continue
            met.add(id(container))
            yield container
            for stream in reversed(container.streams):
                todo.extend(nested.container for nested in reversed(stream.nested))


class InnerFile(NamedTuple):
    """A container in the bytes that a pickle holds."""

    #: the bytes, or the text that spells them
    node: Blob | Text
    #: the node for the decoded bytes: the same node, or the call that decodes the text
    maker: Node
    container: Container


class Candidate(NamedTuple):
    """Bytes that may be a container."""

    node: Blob | Text
    maker: Node
    source: Readable


class PickleStream:
    """One pickle."""

    def __init__(
        self, source: Readable, start: int, number: int, budget: Budget, *, broken: bool = False
    ) -> None:
        """Read the pickle at `start`, within the budget of its file.

        If `broken`, as much of it as makes sense.
        """
        self.source = source
        self.start = start
        #: the base of the offsets of its nodes
        self.base = number * _SPAN
        self.is_whole = True  #: whether it could be read completely
        if broken:
            from ..pickles.fetch import fetch_prefix
            from ..pickles.prefix import walk_prefix

            self._fetched = fetched = fetch_prefix(source, start)
            gaps = fetched.gap_sizes()
            self.pickle, self.is_whole = walk_prefix(fetched.data, self.base, gaps, budget)
        else:
            self._fetched, self.pickle = walk_at(source, start, self.base, budget)
        # `data` lacks the skipped bytes; `nbytes` is the full size in the source
        self.data, self.nbytes = self._fetched.data, self._fetched.nbytes
        #: the names that it imports
        self.names = {each.qualname for each in self.pickle.globals}
        self.nested: list[InnerFile] = []
        #: how many nested byte strings, at any depth, look like containers but can't be read
        self.unread = 0
        self.reached: Sequence[str] = ()  # names that unpickling these would import

    def candidates(self) -> Iterator[Candidate]:
        """The bytes in it that may be containers."""
        for blob in self.pickle.blobs:
            at = self._payload_at(blob)
            if at is not None:
                source = self.source.window(at, blob.nbytes)
                if blob.content is not None or may_be_checkpoint(source.read(0, 64)):
                    yield Candidate(blob, blob, source)
            elif blob.content is not None:
                yield Candidate(blob, blob, Memory(blob.content, self.source.path))
        decoded: dict[int, bytes | None] = {}  # by text, since many calls may decode the same text
        for call in self.calls_of(ENCODE):
            text = bytes_as_text(call)
            if text is not None:
                if id(text) not in decoded:
                    decoded[id(text)] = latin_1(text)
                content = decoded[id(text)]
                if content is not None:
                    yield Candidate(text, call, Memory(content, self.source.path))

    def passed_over(self) -> Iterator[tuple[Blob, Readable]]:
        """The bytes in it that are not held in memory, each with its source."""
        for blob in self.pickle.blobs:
            at = self._payload_at(blob)
            if blob.content is None and at is not None:
                yield blob, self.source.window(at, blob.nbytes)

    def calls_of(self, name: str) -> Sequence[Call]:
        """All its calls, if it imports a function of that name; else none."""
        return self.pickle.calls if name in self.names else ()

    def _payload_at(self, blob: Blob) -> int | None:
        """The offset of the bytes in the source; None if they are spelled as text."""
        at = blob.at - self.base
        gap = self._fetched.gaps.get(at)
        if gap is not None:
            return self.start + gap.start
        width = count_nbytes(self.data[at])
        return self.start + self._fetched.place(at) + 1 + width if 0 < width <= 8 else None

    def edits(self, spelling: LocationEdits, *, exact: bool) -> list[Edit] | None:
        """The changes of the source that respell this pickle and its nested containers.

        If `exact`, the pickle must keep its length; None if that is not possible.
        """
        from ..pickles.splice import changes

        respelling = spelling.of(self)
        inside: list[Edit] = []
        for nested in self.nested:
            plan = spelling.plan_of(nested.container)
            if plan.method != "clone":
                inside += self._replace(nested, plan, respelling)
        if not respelling:
            return inside
        rewritten = map(self.base.__add__, chain(respelling.texts, respelling.contents))
        if not self.pickle.shared_texts.isdisjoint(rewritten):
            raise UnsupportedError("a string to rewrite has other uses that can't be told apart")
        found = changes(self.survey, respelling, exact=exact)
        if found is None or (exact and respelling.growths):
            return None
        if not (respelling.spans or respelling.growths):
            spelling.respellings[self.base] = found, respelling.texts
        joined = self._joined(found, inside, exact=exact)
        return None if joined is None else inside + joined

    @cached_property
    def survey(self) -> Survey:
        """The offsets of its opcodes."""
        return Survey(self.data, self.pickle.recalled)

    def is_respelled(self, new: Readable, spelling: LocationEdits) -> bool:
        """Whether bytes are surely this pickle with a spelling that was planned for it.

        Nothing is walked: the plan is proved correct, and the bytes are compared with those of the
        plan.
        """
        from ..pickles.replacements import is_applied
        from ..pickles.respelled import is_respelling

        changes, texts = spelling.respellings.get(self.base, (None, {}))
        if changes is None or self.nested or self._fetched.gaps:
            return False
        is_made = is_applied(self.data, changes, new)
        return is_made and is_respelling(self.survey, changes, texts)

    def _replace(self, nested: InnerFile, plan: Plan, respelling: Respelling) -> Iterator[Edit]:
        """Replace the content of a nested container by the result of a plan."""
        from ..plans.plan import Edit, apply_plan

        node, source = nested.node, nested.container.source
        at = node.at - self.base
        start = self._payload_at(node) if isinstance(node, Blob) else None
        made = apply_plan(plan, source.content) if isinstance(source, Memory) else plan
        if start is not None:
            respelling.length(self.data, at, source.nbytes, plan.nbytes)
            yield Edit(start, start + source.nbytes, made)
        else:
            assert isinstance(made, bytes)
            respelling.content(self.data, at, made)

    def _joined(self, found: Replacements, inside: list[Edit], *, exact: bool) -> list[Edit] | None:
        """Merge changes of `data`, and return them with offsets in the source.

        `found` is in order; they must not be merged across changes in `inside`, which have offsets
        in the source. If `exact`, each merged change must keep its length; None if that is not
        possible.
        """
        barriers = sorted({*(edit.start for edit in inside), *self._fetched.gap_starts(self.start)})
        joined: list[Edit] = []
        first = last = grown = 0  # the group found[first:last], and by how much it grows
        before_end = 0
        for last, (start, end, new) in enumerate(found):
            near = (exact and grown) or start - before_end < _NEAR
            blocked = bool(barriers and last > first) and _any_between(
                barriers, self._place(before_end - 1), self._place(start)
            )
            if exact and grown and blocked:
                return None
            if last > first and (blocked or not near):
                joined.append(self._join(found.part(first, last)))
                first, grown = last, 0
            grown += len(new) - (end - start)
            before_end = end
        if exact and grown:
            return None
        return [*joined, self._join(found.part(first, len(found)))]

    def _join(self, found: Replacements) -> Edit:
        """Merge neighboring changes of `data` into one change of the source."""
        from ..pickles.replacements import apply_replacements
        from ..plans.plan import Edit

        start, end = found.start, found.end
        new = apply_replacements(self.data, found, start, end)
        return Edit(self._place(start), self._place(end - 1) + 1, new)

    def _place(self, at: int) -> int:
        """The offset in the source of a byte of `data`."""
        return self.start + self._fetched.place(at)


def _any_between(sorted_offsets: list[int], start: int, end: int) -> bool:
    return bisect_right(sorted_offsets, start) < bisect_right(sorted_offsets, end)
