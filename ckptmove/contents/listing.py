"""Go through a walked pickle once, and list what it holds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeGuard

from ..device import names_device
from ..errors import CorruptError
from ..manifest import MOST_SHARED, Alias, NamedDevice, Role, Section, TensorEntry
from ..paths import Key, Path, spell
from ..pickles.nodes import Blob, Call, Dict, Global, List, Node, Persistent, Set, Text, Tuple
from ..pickles.nodes import Mapping as MappingNode
from .code import Literal
from .sections import (
    Rng,
    is_capturable,
    is_optimizer,
    is_rng_state,
    mesh_device_type,
    optimizer_roles,
    remote_device,
    rng_within,
    section_of,
)
from .streams import Container, Whole
from .strided import Tensor
from .tensors import Recogniser, device_text

_WORTH_A_VISIT = (Text, Tuple, List, Set, Dict, Call, Persistent, Blob)
_LEAST_ROOM = 1 << 22  # for names and paths; a pickle of a few bytes may need some
_ROOM_PER_BYTE = 64  # of what describes the content, for names and paths
_LONGEST_IN_KEY = 64  # characters of a text in a tuple that is a key and shown as it is
#: What libtorch's pickler wraps around a list or dict to say its type.
_TRANSPARENT = {
    *(f"torch.jit._pickle.build_{kind}list" for kind in ("tensor", "int", "double", "bool")),
    "torch.jit._pickle.restore_type_tag",
}
_SAFE_BITS = 60  # of a number that is its own hash
_SETS = ("builtins.set", "builtins.frozenset")
_MOST_IN_KEY = 8  # items of a tuple that is a key and shown as it is
_DEEPEST = 1000  # keys in a path; a pickler recurses and can't go nearly as deep


class Contents:
    """What a pickle holds: the fields of a `Manifest`, and the nodes that spell devices."""

    def __init__(self) -> None:
        self.tensors: list[TensorEntry] = []
        self.nodes: list[Node] = []  # of each tensor
        self.values: list[NamedDevice] = []
        self.objects: Counter[str] = Counter()
        self.aliases: list[Alias] = []
        self.capturable: list[str] = []
        self.meshes: list[Text] = []
        self.remotes: list[Call] = []
        self.spelled: dict[int, tuple[Text | Call, ...]] = {}  # index of a tensor → its own words
        self.value_nodes: list[Text | Call | Literal] = []  # of each value that names a device


class _Context(NamedTuple):
    """What the way to a node says about it."""

    section: Section = Section.OTHER
    role: Role | None = None
    part_of: str | None = None
    rng: Rng = Rng.UNKNOWN
    in_set: bool = False
    model_at: int | None = None  # the depth of the model's state dict, inside of one


def contents_of(container: Container, found: Whole) -> Contents:
    """List the tensors, device names and objects of a checkpoint.

    Args:
        container: the checkpoint.
        found: all that it holds.

    Raises:
        CorruptError: a tensor makes no sense, or the tree is absurdly deep.
        UnsupportedError: a tensor is of a kind that is not known.
    """
    nbytes = sum(each.described_nbytes for each in container.everything())
    listing = _Listing(found, nbytes)
    for path, root in container.roots:
        listing.run(root, path, _Context(container.section))
    for stream in found.streams:
        if stream.pickle.dropped:  # unpickling made these too: by setters of state, for one
            reachable = _reachable(stream.pickle.root)
            for n, node in enumerate(stream.pickle.dropped):
                if id(node) not in reachable:
                    listing.run(node, ("<dropped>", n), _Context(container.section))
    listing.list_aliases()
    for each in container.everything():
        for value, literal in each.named:
            listing.contents.values.append(value)
            listing.contents.value_nodes.append(literal)
    listing.contents.tensors = with_shared(listing.contents.tensors)
    return listing.contents


class _Listing:
    def __init__(self, found: Whole, nbytes: int) -> None:
        """Args:
        found: all that the checkpoint holds.
        nbytes: how many bytes say so.
        """
        # From one node to another; an opcode makes two of these steps at most.
        self.room = 2 * nbytes
        self.room_for_names = _LEAST_ROOM + _ROOM_PER_BYTE * nbytes
        self.pids = {id(p.pid) for s in found.streams for p in s.pickle.persistents}
        self.grafts = found.grafts
        self.recogniser = Recogniser(found.ids, found.tensors)
        self.contents = Contents()
        self.first: dict[int, Path] = {}  # container → where it was met first
        self.roles: dict[int, Role] = {}  # tensor → its role in an optimizer
        self.internal: set[int] = set()  # nodes that name a device, but for no use of the user's
        self.met_again: list[tuple[Path, Path]] = []  # a container's path, and where it was first
        self.todo: list[tuple[Node, Path, _Context]] = []

    def run(self, root: Node, path: Path, context: _Context) -> None:
        self.todo.append((root, path, context))
        while self.todo:
            node, path, context = self.todo.pop()
            if len(path) > _DEEPEST:
                raise CorruptError(f"the checkpoint is nested more than {_DEEPEST} levels deep")
            try:
                self.visit(node, path, context)
            except CorruptError as error:
                raise CorruptError(f"{error}, at {spell(path)!r}") from error

    def list_aliases(self) -> None:
        """Of the containers that were met again, those that hold tensors."""
        holding = {e.path[:n] for e in self.contents.tensors for n in range(len(e.path))}
        self.contents.aliases += [
            Alias(self.name(path), self.name(first))
            for path, first in self.met_again
            if first in holding
        ]

    def name(self, path: Path) -> str:
        name = spell(path)
        self.take_room(len(name))
        return name

    def take_room(self, characters: int) -> None:
        """Count what names and paths take.

        Raises:
            CorruptError: it is absurdly much for a pickle of that size.
        """
        self.room_for_names -= characters
        if self.room_for_names < 0:
            raise CorruptError("the names in the checkpoint take too much memory")

    def take_steps(self, steps: int) -> None:
        """Count steps from one node to another.

        Raises:
            CorruptError: there are more than the opcodes can have made.
        """
        self.room -= steps
        if self.room < 0:
            raise CorruptError("the checkpoint leads to the same things in too many ways")

    def visit(self, node: Node, path: Path, context: _Context) -> None:
        grafted = self.grafts.get(id(node)) if isinstance(node, (Blob, Call)) else None
        if grafted is not None:
            self.take_steps(1)
            self.push((root, (*path, *keys), context) for keys, root in grafted)
        elif isinstance(node, Text):
            if names_device(node) and id(node) not in self.internal:
                self.name_device(node, path, str(node), "str", context)
        elif isinstance(node, Persistent):
            tensor = self.recogniser.outside(node)
            if tensor is not None:
                self.list_tensor(tensor, node, path, context)
        elif isinstance(node, Call):
            tensor = self.recogniser.tensor(node)
            if tensor is None:
                self.enter(node, path, context)
            else:
                self.list_tensor(tensor, node, path, context)
        elif isinstance(node, (Tuple, List, Set, Dict)):
            self.enter(node, path, context)

    def name_device(
        self, node: Text | Call, path: Path, value: str, kind: str, context: _Context
    ) -> None:
        fixed = context.in_set or path[-1:] == ("<key>",)
        self.contents.values.append(NamedDevice(path, self.name(path), value, kind, fixed))
        self.contents.value_nodes.append(node)

    # -- tensors -------------------------------------------------------------------------------

    def list_tensor(self, tensor: Tensor, node: Node, path: Path, context: _Context) -> None:
        role = self.roles.get(id(node), context.role)
        section = context.section
        key = path[-1] if path else None
        if tensor.dtype == "uint8" and is_rng_state(tensor.shape, key, context.rng):
            role, section = Role.RNG_STATE, Section.RNG
        if section is Section.OTHER and tensor.kind == "parameter":
            section = Section.MODEL
        name = self.name(path)
        entry = TensorEntry(
            path=path,
            name=name,
            section=section,
            kind=tensor.kind,
            layout=tensor.layout,
            dtype=tensor.dtype,
            shape=tensor.shape,
            stride=tensor.stride,
            offset=tensor.offset,
            device=tensor.device,
            nbytes=tensor.nbytes,
            storage=tensor.storage,
            requires_grad=tensor.requires_grad,
            state_key=None if context.model_at is None else spell(path[context.model_at :]),
            part_of=context.part_of,
            role=role,
            says_device=bool(tensor.spelled),
        )
        if tensor.spelled:
            self.contents.spelled[len(self.contents.tensors)] = tensor.spelled
        self.contents.tensors.append(entry)
        self.contents.nodes.append(node)
        if self.first.setdefault(id(node), path) is not path:
            return  # what hangs on it was listed there; tensors may hang on each other in a ring
        self.take_steps(len(tensor.children))
        inner = context._replace(section=section, role=role)
        if tensor.composite:
            inner = inner._replace(part_of=entry.name)
        self.push(
            (child.node, (*path, child.key), inner._replace(role=child.role or role))
            for child in tensor.children
        )

    # -- everything else -----------------------------------------------------------------------

    def enter(self, node: Tuple | List | Set | Dict | Call, path: Path, context: _Context) -> None:
        """List what is inside a container or object, once."""
        before = self.first.setdefault(id(node), path)
        device = device_text(node)
        if device is not None and isinstance(node, Call) and id(node) not in self.internal:
            self.name_device(node, path, device, "torch.device", context)
        if before is not path:
            self.met_again.append((path, before))
            return
        if isinstance(node, Call):
            self.count(node)
            if device is not None:
                return
        if id(node) in self.pids:  # no pickler hands out the tuple that it makes for a storage
            raise CorruptError("the id of a storage is also a value")
        self.take_steps(_breadth(node))
        inside = [(keys, c) for keys, c in children_of(node) if isinstance(c, _WORTH_A_VISIT)]
        within = self.within(node, path, context, inside)
        self.push((child, (*path, *keys), within) for keys, child in inside)

    def count(self, node: Call) -> None:
        name = node.qualname or "(called indirectly)"
        if name != "collections.OrderedDict" and name not in _TRANSPARENT:
            self.contents.objects[name] += 1
        mesh = mesh_device_type(node)
        if mesh is not None:
            self.contents.meshes.append(mesh)
            self.internal.add(id(mesh))
        remote = remote_device(node)
        if remote is not None:
            self.contents.remotes.append(remote)
            self.internal.add(id(remote))

    def within(
        self,
        node: Tuple | List | Set | Dict | Call,
        path: Path,
        context: _Context,
        inside: Sequence[tuple[Path, Node]],
    ) -> _Context:
        """What a container says about its content."""
        if isinstance(node, MappingNode):
            section = section_of(node)
            if section is Section.OPTIMIZER:
                held = node.state if isinstance(node, Call) and not node.pairs else node
                if isinstance(held, MappingNode):
                    self.note_optimizer(held, path)
            if section is not None and context.section in (Section.OTHER, Section.MODEL):
                context = context._replace(section=section)
            if section is Section.MODEL and context.model_at is None:
                context = context._replace(model_at=len(path))
            if isinstance(node, Call) and mesh_device_type(node) is not None:
                context = context._replace(role=Role.RANK_MAP)
            if isinstance(node, Call) and node.qualname == "torch._C.Generator":
                args = node.args.items if isinstance(node.args, Tuple) else []
                self.internal.update(map(id, args))  # its device, which it can't leave
        key = path[-1] if path else None
        children = [child for _, child in inside]
        rng = rng_within(node, key, children, context.rng)
        in_set = isinstance(node, Set) or (isinstance(node, Call) and node.qualname in _SETS)
        if isinstance(node, (Tuple, List)):  # the arguments that a set is made of
            in_set = context.in_set
        return context._replace(rng=rng, in_set=in_set)

    def note_optimizer(self, node: MappingNode, path: Path) -> None:
        if is_optimizer(node):
            self.roles.update((id(tensor), role) for tensor, role in optimizer_roles(node))
            if is_capturable(node):
                self.contents.capturable.append(spell(path))

    def push(self, children: Iterator[tuple[Node, Path, _Context]]) -> None:
        pushed = []
        for child in children:
            self.take_room(len(child[1]))
            pushed.append(child)
        self.todo.extend(reversed(pushed))


def _breadth(node: Tuple | List | Set | Dict | Call) -> int:
    """How many things a container or object holds."""
    held = len(node.pairs) if isinstance(node, MappingNode) else 0
    if not isinstance(node, Dict):
        held += len(node.items)
    if isinstance(node, Call):
        states = node.state.items if isinstance(node.state, Tuple) else [node.state]
        held += 1 + len(states) + sum(len(each.pairs) for each in states if isinstance(each, Dict))
    return held


def _reachable(root: Node) -> set[int]:
    """The `id()` of every node that can be reached, by whatever way."""
    found: set[int] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if id(node) in found or not isinstance(node, _WORTH_A_VISIT):
            continue
        found.add(id(node))
        if isinstance(node, MappingNode):
            todo.extend(each for pair in node.pairs for each in pair)
        if isinstance(node, Call):
            todo += [node.function, node.args, node.kwargs, node.state]
        if isinstance(node, (Tuple, List, Set, Call)):
            todo.extend(node.items)
    return found


def children_of(node: Tuple | List | Set | Dict | Call) -> Iterator[tuple[Path, Node]]:
    """What a node holds, with the keys that lead there: attributes as if they were keys."""
    if isinstance(node, Call):
        if not isinstance(node.function, Global):
            yield ("<function>",), node.function
        if node.qualname in _TRANSPARENT and isinstance(node.args, Tuple) and node.args.items:
            yield (), node.args.items[0]
        elif not (isinstance(node.args, Tuple) and not node.args.items):
            yield ("<args>",), node.args
        if node.kwargs is not None:
            yield ("<kwargs>",), node.kwargs
        states = node.state.items if isinstance(node.state, Tuple) else [node.state]
        for n, state in enumerate(states):
            if isinstance(state, Dict):
                yield from _pairs(state)
            elif state is not None:
                yield ("<state>", n) if len(states) > 1 else ("<state>",), state
    if isinstance(node, MappingNode):
        yield from _pairs(node)
    if not isinstance(node, Dict):
        yield from (((n,), each) for n, each in enumerate(node.items))


def _pairs(node: MappingNode) -> Iterator[tuple[Path, Node]]:
    """The pairs that a dict keeps: of those with equal keys, the last."""
    last = {_hashed(key): n for n, (key, _) in enumerate(node.pairs) if _is_plain(key)}
    for n, (key, value) in enumerate(node.pairs):
        if _is_plain(key):
            if last[_hashed(key)] == n:
                short = isinstance(key, str) and len(key) <= 1000  # a long one is shared
                yield (str(key) if short else _in_path(key),), value
        else:
            spelled = _spell_key(key, n)
            yield (spelled,), value
            yield (spelled, "<key>"), key


def _hashed(key: Key) -> Key:
    """What a key is looked up by: large numbers can be chosen to have all the same hash."""
    return f"{key:x}" if isinstance(key, int) and key.bit_length() > _SAFE_BITS else key


def _in_path(key: Key) -> Key:
    """A key as paths have it, which are looked up too: large numbers as text."""
    return spell((key,)) if isinstance(key, int) and key.bit_length() > _SAFE_BITS else key


def _is_plain(key: Node) -> TypeGuard[Key]:
    return key is None or isinstance(key, (str, int, float, bytes))


def _spell_key(key: Node, n: int) -> Key:
    """A key that is no scalar, as text: a short tuple as it is, else by its number."""
    if isinstance(key, Tuple) and len(key.items) <= _MOST_IN_KEY:
        items = [item for item in key.items if isinstance(item, (int, str))]
        short = all(len(item) <= _LONGEST_IN_KEY for item in items if isinstance(item, str))
        if short and len(items) == len(key.items):
            return "(" + ", ".join(map(_spell_item, items)) + ")"
    return device_text(key) or f"<key {n}>"


def _spell_item(item: int | str) -> str:
    return repr(str(item)) if isinstance(item, str) else spell((item,))


def with_shared(tensors: list[TensorEntry]) -> list[TensorEntry]:
    """Fill in `shared_with`."""
    names: dict[str, list[str]] = defaultdict(list)
    for entry in tensors:
        if entry.storage is not None:
            names[entry.storage].append(entry.name)
    for n, entry in enumerate(tensors):
        sharing = names.get(entry.storage or "", [])
        if len(sharing) > 1:
            others = [name for name in sharing[: MOST_SHARED + 1] if name != entry.name]
            tensors[n] = replace(entry, shared_with=tuple(others[:MOST_SHARED]))
    return tensors
