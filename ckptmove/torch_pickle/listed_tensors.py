"""Add tensors to the listing of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

from ..errors import CorruptError
from ..manifest.manifest import Role, Section, Storage, TensorEntry
from ..manifest.other_records import Alias, NamedDevice
from ..manifest.paths import Path, spell
from ..pickles.nodes import Call, Node, Text
from ..pickles.opcodes.plain_tensors import compact_form
from .pickled_modules import StateDictDoubts, Way, name_of
from .sections.sections import Context, is_rng_state
from .values.numpy_arrays import KIND
from .values.strided import Tensor
from .values.tensors import Recogniser

if TYPE_CHECKING:
    from .torchscript_code import Literal

_LONGEST_ROW, _SHORTEST_ROW = 1 << 8, 1 << 3  # plain tensors that are listed at once
_DEEPEST = 1000  # keys in a path; a pickler recurses and can't nest nearly as deep
Step = tuple[Node, Path, Context]  # a node to visit, with its path and context
_LEAST_ROOM = 1 << 22  # characters of names and paths; even a tiny pickle may need some
_ROOM_PER_BYTE = 64  # characters of names and paths, per byte of description
_LEAST_TENSORS, _NBYTES_OF_TENSOR = 1 << 14, 56  # a pickle takes about 90 bytes for a tensor
_NBYTES_OF_REPEAT = 512  # bytes of description for each repeated tensor
_LEAST_AGAIN = 10_000
_LEAST_PLACES, _NBYTES_OF_PLACE = 1 << 16, 64  # for containers that occur again


class Allowance:
    """The remaining budget for listing one checkpoint."""

    def __init__(self, nbytes: int) -> None:
        """`nbytes`: the size of the data that describes the checkpoint."""
        # Steps from one node to another; an opcode makes at most two of them.
        self.room = 2 * nbytes
        self.room_for_names = _LEAST_ROOM + _ROOM_PER_BYTE * nbytes
        self.room_for_tensors = _LEAST_TENSORS + nbytes // _NBYTES_OF_TENSOR
        self.room_for_repeats = _LEAST_TENSORS + nbytes // _NBYTES_OF_REPEAT
        self.room_for_places = _LEAST_PLACES + nbytes // _NBYTES_OF_PLACE
        self.room_again = _LEAST_AGAIN + nbytes // 8  # steps within repeated modules

    def take_room(self, characters: int) -> None:
        """Count characters of names and paths; CorruptError if they take too much memory."""
        self.room_for_names -= characters
        if self.room_for_names < 0:
            raise CorruptError("the names in the checkpoint would take too much memory")

    def take_tensors(self, *, again: bool) -> None:
        """Count a tensor or a named device; CorruptError if there are far too many."""
        self.room_for_tensors -= 1
        self.room_for_repeats -= again
        if self.room_for_tensors < 0 or self.room_for_repeats < 0:
            raise CorruptError("it lists far more tensors or devices than its size allows")

    def take_place(self) -> None:
        """Count a repeated container; CorruptError if there are too many."""
        self.room_for_places -= 1
        if self.room_for_places < 0:
            raise CorruptError("the same objects appear in far too many places")

    def take_steps(self, steps: int) -> None:
        """Count steps from one node to another; CorruptError if opcodes can't have made so many."""
        self.room -= steps
        if self.room < 0:
            raise CorruptError("the same objects are reached on too many paths")


class PickleContents:
    """The contents of a pickle: the fields of a `Manifest`, and the nodes that spell devices."""

    def __init__(self) -> None:
        self.tensors: list[TensorEntry] = []
        self.nodes: list[Node] = []  # the node of each tensor
        self.storages: Mapping[str, Storage] = {}  # stand for the bytes of numpy arrays
        self.loose: list[tuple[str, Call]] = []  # long arrays that are data, with their names
        # names that several tensors would have: their final names quote keys
        self.alike: set[str] = set()
        # for each tensor, the depth of the container of its model's weights
        self.weights_at: list[int | None] = []
        self.opened: dict[int, Section] = {}  # `id()` of a container → its section
        self.mixed: set[int] = set()  # `id()` of state dicts that hold averages beside the weights
        self.values: list[NamedDevice] = []
        self.objects: Counter[str] = Counter()
        self.aliases: list[Alias] = []
        self.capturable: list[str] = []
        self.meshes: list[Text] = []
        self.remotes: list[Call] = []
        # index of a tensor → the nodes that spell its device
        self.spelled: dict[int, tuple[Text | Call, ...]] = {}
        # the node of each value that names a device
        self.value_nodes: list[Text | Call | Literal] = []
        self.doubts = StateDictDoubts()  # about modules whose state dict is unknown


def check_depth(path: Path) -> None:
    """CorruptError if a path has more keys than any pickler can nest."""
    if len(path) > _DEEPEST:
        raise CorruptError(f"the checkpoint is nested more than {_DEEPEST} levels deep")


def are_compact(nodes: Iterable[Node]) -> bool:
    """Whether all nodes are plain tensors in compact form, without hooks."""
    return all([compact_form(node) is not None for node in nodes])


class TensorListing(Allowance):
    """The tensors that were found, and the nodes that are still to be visited."""

    def __init__(self, nbytes: int, recogniser: Recogniser) -> None:
        """`nbytes`: the size of the data that describes the checkpoint."""
        super().__init__(nbytes)
        self.recogniser = recogniser
        self.contents = PickleContents()
        self.first: dict[int, Path] = {}  # container or tensor → the path where it was first found
        self.roles: dict[int, Role] = {}  # tensor → its role in an optimizer
        # For each unfinished container, the children that are still to be visited; an iterator,
        # since a list of them may be long.
        self.todo: list[Iterator[Step]] = []

    def push(self, children: Iterator[Step]) -> None:
        """Visit these nodes next, and everything below them."""
        self.todo.append(children)

    def name(self, path: Path, way: Way | None) -> str:
        """The name for a path; CorruptError if all names would take too much memory."""
        name = name_of(path, way)
        self.take_room(len(name))
        return name

    def list_tensor(self, tensor: Tensor, node: Node, path: Path, context: Context) -> None:
        """List a tensor at a path; its children are visited next."""
        array = tensor.kind == KIND
        role = Role.ARRAY if array else self.roles.get(id(node), context.role)
        section = context.section
        key = path[-1] if path else None
        if tensor.dtype == "uint8" and not array and is_rng_state(tensor.shape, key, context.rng):
            role, section = Role.RNG_STATE, Section.RNG
        if section is Section.OTHER and tensor.kind == "parameter":
            section = Section.EMA if context.averaged else Section.MODEL
        name, way = self.name(path, context.way), context.way
        beside = way is not None and way.beside
        model_at = None if beside else context.model_at
        state_key = None
        if model_at is not None:
            state_key = name_of(path, way, model_at) if model_at else name
        dtype, shape, device, nbytes, kind, layout, stride, offset, storage, grad = tensor[:10]
        entry = TensorEntry(  # by place, since there may be very many
            *(name, path, section, kind, layout, dtype, shape, stride, offset, device, nbytes),
            *(storage, grad, state_key, context.part_of, role, (), bool(tensor.spelled), None),
            beside,
        )
        if tensor.spelled:
            self.contents.spelled[len(self.contents.tensors)] = tensor.spelled
        self.contents.tensors.append(entry)
        self.take_tensors(again=id(node) in self.first)
        self.contents.nodes.append(node)
        self.contents.weights_at.append(context.weights_at)
        if self.first.setdefault(id(node), path) is not path:
            # its children were listed there; tensors may be children of each other, in a cycle
            return
        if not tensor.children:
            return
        self.take_steps(len(tensor.children))
        inner = context._replace(section=section, role=role)
        if tensor.composite:
            inner = inner._replace(part_of=entry.name)
        self.push(
            (child.node, (*path, child.key), inner._replace(role=child.role or role))
            for child in tensor.children
        )

    def list_plain(
        self, inside: Iterable[tuple[Path, Node]], path: Path, context: Context
    ) -> Iterator[Step]:
        """List plain tensors as visiting each of them would; yield all other nodes, to be visited.

        All of them are outside of pickled modules.
        """
        rest = iter(inside)
        rows: list[list[tuple[Path, Node]]] = []
        while row := rows.pop() if rows else list(islice(rest, _LONGEST_ROW)):
            if self.list_row(row, path, context):
                continue
            half = len(row) // 2
            if half < _SHORTEST_ROW:
                yield from ((node, (*path, *keys), context) for keys, node in row)
            else:
                rows += [row[half:], row[:half]]

    def list_row(self, row: list[tuple[Path, Node]], path: Path, context: Context) -> bool:
        """List plain tensors of a container at once; False if one of them must be visited."""
        nodes = [node for _, node in row]
        found = self.recogniser.plain_row(nodes)
        if found is None or not all(len(keys) == 1 and type(keys[0]) is str for keys, _ in row):
            return False
        contents, known, count = self.contents, list(map(id, nodes)), len(row)
        keys = [str(key) for (key,), _ in row]
        kinds, layouts, dtypes, shapes, *columns = zip(*found, strict=True)
        rng = "uint8" in dtypes and any(
            dtype == "uint8" and is_rng_state(shape, key, context.rng)
            for dtype, shape, key in zip(dtypes, shapes, keys, strict=True)
        )
        start = f"{spell(path)}." if path else ""
        characters = sum(map(len, keys)) + count * (len(start) + len(path) + 1)
        if (
            rng
            or len(path) >= _DEEPEST
            or self.room_for_names < characters
            or self.room_for_tensors < count
            or len(set(known)) < count
            or not self.first.keys().isdisjoint(known)
        ):
            return False
        self.take_room(characters)
        self.room_for_tensors -= count
        names = [start + key for key in keys] if start else keys
        paths = [(*path, key) for key in keys]
        model_at = context.model_at
        states: Iterable[str | None] = repeat(None)
        if model_at is not None:
            rest = f"{spell(path[model_at:])}." if path[model_at:] else ""
            states = [rest + key for key in keys] if model_at else names
        roles = [self.roles.get(each, context.role) for each in known]
        section, part_of, no = repeat(context.section), repeat(context.part_of), repeat(False)
        fields: list[Iterable[Any]] = [names, paths, section, kinds, layouts, dtypes, shapes]
        fields += [*columns, states, part_of, roles, repeat(()), no, repeat(None), no]
        rows = zip(*fields, strict=False)  # the constructor would take longer
        contents.tensors += map(tuple.__new__, repeat(TensorEntry), rows)
        contents.nodes += nodes
        contents.weights_at += [context.weights_at] * count
        self.first.update(zip(known, paths, strict=True))
        return True
