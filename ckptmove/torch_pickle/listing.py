"""Walk the nodes of a pickle once, and list its tensors, objects and devices."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ..errors import CorruptError
from ..manifest.manifest import Role, Section
from ..manifest.other_records import Alias, NamedDevice
from ..manifest.paths import Path
from ..pickles.device_tags import names_device
from ..pickles.hash_costs import check_keys
from ..pickles.nodes import (
    TEXTS,
    Blob,
    Call,
    Dict,
    Global,
    List,
    Node,
    Persistent,
    Set,
    Text,
    Tuple,
)
from ..pickles.nodes import Mapping as MappingNode
from ..pickles.opcodes.pairs import keys_of
from ..pickles.opcodes.plain_tensors import PlainTensor, compact_form, is_compact
from ..sources.budget import Budget
from .children import TRANSPARENT, breadth, reachable, visits_of
from .listed_tensors import PickleContents, Step, TensorListing, are_compact, check_depth
from .merged_contents import MergedContents
from .pickled_modules import (
    Doubt,
    Inside,
    Way,
    attributes_of,
    doubt_within,
    inside_buffers,
    inside_module,
    is_hooked,
    is_packed,
    name_of,
)
from .sections.averages import are_tensors, averages_within, is_average
from .sections.sections import (
    Context,
    Rng,
    child_context,
    holds_weights,
    initial_score,
    is_capturable,
    is_cpu_generator_state,
    is_graph_data,
    is_optimizer,
    mesh_device_type,
    optimizer_roles,
    remote_device,
    rng_within,
    section_of,
)
from .sections.tensor_names import set_apart, with_shared
from .streams import Container
from .values.numpy_arrays import Arrays, array_of, content_of
from .values.tensors import Recogniser, device_text

#: The path below which a program keeps the inputs it was traced with; they are not model weights.
_EXAMPLES = ("traced_inputs",)
#: The sections within which another section may begin.
_OPEN = (Section.OTHER, Section.MODEL, Section.EMA)
_SETS = ("builtins.set", "builtins.frozenset")
_LATER = Global("", "", 0)  # stands for everything in `later`


_Held = Tuple | List | Set | Dict | Call
_END: Step = (Global("", "", 0), (), Context())


def contents_of(
    container: Container,
    found: MergedContents,
    recogniser: Recogniser | None = None,
    storages: Collection[str] | None = None,
) -> PickleContents:
    """List the tensors, device names and objects of a checkpoint.

    `recogniser` and `storages` (their ids) default to those of `found`.
    """
    nbytes = sum(each.described_nbytes for each in container.everything())
    recogniser = recogniser or Recogniser(found.ids, found.tensors)
    arrays = Arrays(found.storages if storages is None else storages)
    listing = _Listing(found, nbytes, recogniser, arrays)
    for path, root in container.roots:
        example = container.program and path[:1] == _EXAMPLES
        section = Section.OTHER if example else container.section_at(path)
        rng = Rng.INSIDE if section is Section.RNG else Rng.UNKNOWN
        listing.run(root, path, Context(section, container.role_at(path), rng=rng))
    for stream in found.streams:
        # unpickling made these too, and may use them: setters of state, for example
        if stream.pickle.dropped:
            met = reachable(stream.pickle.root)
            for n, node in enumerate(stream.pickle.dropped):
                if id(node) not in met:
                    listing.run(node, ("<dropped>", n), Context(container.section))
    listing.list_aliases()
    for each in container.everything():
        for value, literal in each.named:
            listing.contents.values.append(value)
            listing.contents.value_nodes.append(literal)
    listing.contents.storages = listing.arrays.storages
    listing.contents.alike = set_apart(listing.contents.tensors, listing.take_room)
    listing.contents.tensors = with_shared(listing.contents.tensors)
    return listing.contents


class _Slots(NamedTuple):
    """The state that an optimizer has of a parameter: plain tensors below a number."""

    around: Context
    depth: int
    names: list[Node]
    paths: list[Path]
    within: Context


class _Listing(TensorListing):
    def __init__(
        self, found: MergedContents, nbytes: int, recogniser: Recogniser, arrays: Arrays
    ) -> None:
        """`nbytes`: the size of the data that describes the checkpoint."""
        super().__init__(nbytes, recogniser)
        persistents = (each for stream in found.streams for each in stream.pickle.persistents)
        self.pids = {id(each.pid) for each in persistents if not is_compact(each)}
        self.grafts = found.grafts
        self.arrays = arrays
        self.budget = Budget()  # of keys that are checked
        self.internal: set[int] = set()  # nodes that name a device only for internal use
        #: A repeated container: its path and way, and the path and way of its first place.
        self.met_again: list[tuple[Path, Way | None, Path, Way | None]] = []
        self.ways: dict[int, Way] = {}  # container within a module → the way to its first place
        self.leads: dict[int, bool] = {}  # `id()` of a row → whether it has anything to list
        self.slots: _Slots | None = None  # the last optimizer slots
        self.later: list[Iterator[Step]] = []  # the contents of modules other than their state

    def run(self, root: Node, path: Path, context: Context) -> None:
        self.todo.append(iter([(root, path, context)]))
        while self.todo:
            node, path, context = next(self.todo[-1], _END)
            if node is _END[0]:
                self.todo.pop()
                continue
            if node is _LATER:
                self.todo.extend(reversed(self.later))
                self.later.clear()
                continue
            self.take_room(len(path))
            check_depth(path)
            try:
                self.visit(node, path, context)
            except CorruptError as error:
                raise CorruptError(f"{error}, at {name_of(path, context.way)!r}") from error

    def list_aliases(self) -> None:
        """List the repeated containers that hold tensors."""
        if not self.met_again:
            return
        holding = {e.path[:n] for e in self.contents.tensors for n in range(len(e.path))}
        self.contents.aliases += [
            Alias(self.name(path, way), self.name(first, first_way))
            for path, way, first, first_way in self.met_again
            if first in holding
        ]

    def visit(self, node: Node, path: Path, context: Context) -> None:
        if type(node) is PlainTensor and not self.grafts:
            tensor = self.recogniser.tensor(node)
            if tensor is not None:
                self.list_tensor(tensor, node, path, context)
                return
        grafted = self.grafts.get(id(node)) if self.grafts else None
        if grafted is not None and isinstance(node, (Blob, Call)):
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
            if tensor is None and context.state:
                tensor = self.arrays.tensor(node)
            if tensor is None:
                self.enter(node, path, context)
            else:
                self.list_tensor(tensor, node, path, context)
        elif isinstance(node, (Tuple, List, Set, Dict)):
            self.enter(node, path, context)

    def name_device(
        self, node: Text | Call, path: Path, value: str, kind: str, context: Context
    ) -> None:
        self.take_tensors(again=False)
        fixed = context.in_set or path[-1:] == ("<key>",)
        name = self.name(path, context.way)
        self.contents.values.append(NamedDevice(path, name, value, kind, fixed))
        self.contents.value_nodes.append(node)

    # -- everything else -----------------------------------------------------------------------

    def enter(self, node: Tuple | List | Set | Dict | Call, path: Path, context: Context) -> None:
        """List the contents of a container or object, once."""
        if type(node) is Dict and self.list_as_neighbor(node, path, context):
            return
        if id(node) not in self.first:
            check_keys(node, self.budget)
        before = self.first.setdefault(id(node), path)
        if before is not path and not self.is_module_again(node, path, before, context.way):
            return
        if context.way is not None and not context.way.beside:
            context = self.doubted(node, path, context, context.way)
        if before is path and context.way is not None:
            self.ways[id(node)] = context.way
        device = device_text(node)
        if device is not None and isinstance(node, Call) and id(node) not in self.internal:
            self.name_device(node, path, device, "torch.device", context)
        if isinstance(node, Call):
            # a private attribute of modules
            passing = path[-1:] == ("_non_persistent_buffers_set",)
            if before is path and not passing:
                self.count(node)
            if before is path and content_of(node) is not None and array_of(node) is not None:
                self.contents.loose.append((self.name(path, context.way), node))
            if device is not None:
                return
        if id(node) in self.pids:  # a pickler does not share the tuple that it makes for a storage
            raise CorruptError("the id of a storage is also a value")
        self.take_steps(breadth(node))
        inside, children = visits_of(node, self.leads, self.grafts)
        compact = are_compact(children)
        if compact and isinstance(node, Dict) and type(path[-1] if path else None) is int:
            within = self.within_slots(node, path, context, children)
        else:
            within = self.within(node, path, context, children)
        self.contents.opened[id(node)] = within.section
        apart = averages_within(node, within.section)
        if apart and within.section in (Section.MODEL, Section.EMA):
            self.contents.mixed.add(id(node))
        attributes, way = attributes_of(node), within.way
        if attributes is not None and isinstance(node, Call):
            self.push_module(node, attributes, path, within, list(inside), again=before is not path)
        elif way is not None and way.passing:
            self.push_ways(path, within, inside_buffers(way, inside))
        elif way is None and not apart and any(type(each) is PlainTensor for each in children):
            self.push(self.list_plain(inside, path, within))
        else:
            self.push(
                (
                    child,
                    (*path, *keys),
                    child_context(within, apart.get(keys[-1] if keys else None)),
                )
                for keys, child in inside
            )

    def doubted(self, node: _Held, path: Path, context: Context, way: Way) -> Context:
        """If this node makes the state dict of the module unknown, note why.

        Return the new context.
        """
        frame = len(path) - 2
        key = str(path[frame]) if frame in way.elided else None
        doubt = doubt_within(node, key)
        if doubt is None:
            return context
        self.contents.doubts.note(doubt, self.name(path, way))
        return context._replace(way=way._replace(beside=True))

    def is_module_again(self, node: _Held, path: Path, before: Path, way: Way | None) -> bool:
        """Note that a container occurs again; return whether it is listed under this path too.

        A module is listed again, since a state dict has it under each name by which it is
        registered; but not if there are far too many.
        """
        again = way is not None and way.again
        if not again:
            self.take_place()
            self.met_again.append((path, way, before, self.ways.get(id(node))))
        if way is None or way.beside or id(node) in way.above:
            return False
        self.room_again -= 1 + breadth(node)
        return self.room_again >= 0 and (again or attributes_of(node) is not None)

    def push_module(
        self,
        node: Call,
        attributes: MappingNode,
        path: Path,
        within: Context,
        inside: Sequence[tuple[Path, Node]],
        *,
        again: bool,
    ) -> None:
        """Visit the contents of the module's state dict next.

        Everything else after the outermost module.
        """
        way = (within.way or Way())._replace(again=again)
        if is_hooked(attributes) and not again:
            self.contents.doubts.note(Doubt.HOOKED, self.name(path, way))
        if is_packed(node) and not again:
            self.contents.doubts.note(Doubt.OWN, self.name(path, way))
        state, rest = inside_module(node, attributes, len(path), way, inside)
        if way.beside:
            self.push_ways(path, within, rest)
        elif not again:
            self.push_ways(path, within, rest)
            self.later.append(self.todo.pop())
        if not way.above:
            self.todo.append(iter([(_LATER, path, within)]))
        self.push_ways(path, within, state)

    def push_ways(self, path: Path, within: Context, inside: Inside) -> None:
        self.push((child, (*path, *keys), within._replace(way=way)) for keys, child, way in inside)

    def count(self, node: Call) -> None:
        name = node.qualname or "(called indirectly)"
        if name != "collections.OrderedDict" and name not in TRANSPARENT:
            self.contents.objects[name] += 1
        mesh = mesh_device_type(node)
        if mesh is not None:
            self.contents.meshes.append(mesh)
            self.internal.add(id(mesh))
        remote = remote_device(node)
        if remote is not None:
            self.contents.remotes.append(remote)
            self.internal.add(id(remote))

    def list_as_neighbor(self, node: Dict, path: Path, context: Context) -> bool:
        """List a dict next if it has the same keys as the last optimizer slots; False if not.

        An optimizer has one such dict for each parameter: they share their context.
        """
        last = self.slots
        if last is None or last.around is not context or last.depth != len(path):
            return False
        if type(path[-1]) is not int or id(node) in self.first or id(node) in self.pids:
            return False
        pairs, names, within = node.pairs, last.names, last.within
        if len(pairs) != len(names) or within.section in _OPEN or within.way is not None:
            return False
        children = [child for _, child in pairs]
        for (key, child), name in zip(pairs, names, strict=True):
            if type(key) not in TEXTS or key != name or compact_form(child) is None:
                return False
        if any(map(is_cpu_generator_state, children)):
            return False
        self.first[id(node)] = path
        self.take_steps(len(pairs))
        self.contents.opened[id(node)] = within.section
        self.push(self.list_plain(zip(last.paths, children, strict=True), path, within))
        return True

    def within_slots(
        self, node: Dict, path: Path, context: Context, children: list[Node]
    ) -> Context:
        """Like `within`, for plain tensors below a number, as in the state of an optimizer.

        The result is reused for neighbors with the same keys.
        """
        keys, depth = list(keys_of(node.pairs)), len(path)
        generator = any(map(is_cpu_generator_state, children))
        if generator or len(children) != len(keys) or not TEXTS.issuperset(map(type, keys)):
            return self.within(node, path, context, children)
        last = self.slots
        if last is None or last.around is not context or last[1:3] != (depth, keys):
            within = self.within(node, path, context, children)
            paths: list[Path] = [(str(key),) for key in keys]
            last = self.slots = _Slots(context, depth, keys, paths, within)
        return last.within

    def within(
        self,
        node: Tuple | List | Set | Dict | Call,
        path: Path,
        context: Context,
        children: list[Node],
    ) -> Context:
        """The context inside a container."""
        weights = False
        if isinstance(node, MappingNode):
            score = initial_score(node)
            if score is not None:
                self.roles[id(score)] = Role.SCORE
            if is_graph_data(node):
                context = context._replace(data=True)
            section = section_of(node)
            weights = section is Section.MODEL or (section is not None and holds_weights(node))
            if section is Section.MODEL and context.data:
                section = None
            elif section is Section.MODEL and (context.averaged or is_average(node)):
                section = Section.EMA
            if section is Section.OPTIMIZER:
                held = node.state if isinstance(node, Call) and not node.pairs else node
                if isinstance(held, MappingNode):
                    self.note_optimizer(held, path, context.way)
            if section is not None and context.section in _OPEN:
                if section is not context.section:
                    context = context._replace(section=section, weights_at=len(path))
                context = context._replace(averaged=section is Section.EMA)
            if section in (Section.MODEL, Section.EMA) and context.model_at is None:
                context = context._replace(model_at=len(path))
            if isinstance(node, Call) and mesh_device_type(node) is not None:
                context = context._replace(role=Role.RANK_MAP)
            if isinstance(node, Call) and node.qualname == "torch._C.Generator":
                args = node.args.items if isinstance(node.args, Tuple) else []
                self.internal.update(map(id, args))  # its device, which it can't leave
        key = path[-1] if path else None
        if context.averaged and context.section is Section.OTHER and are_tensors(node, children):
            context = context._replace(section=Section.EMA, weights_at=len(path))
        rng = rng_within(node, key, children, context.rng)
        state = weights and rng in (Rng.UNKNOWN, Rng.NEVER)
        in_set = isinstance(node, Set) or (isinstance(node, Call) and node.qualname in _SETS)
        if isinstance(node, (Tuple, List)):  # the arguments from which a set is made
            in_set = context.in_set
        return context._replace(rng=rng, in_set=in_set, state=state)

    def note_optimizer(self, node: MappingNode, path: Path, way: Way | None) -> None:
        if is_optimizer(node):
            self.roles.update((id(tensor), role) for tensor, role in optimizer_roles(node))
            if is_capturable(node):
                self.contents.capturable.append(name_of(path, way))
