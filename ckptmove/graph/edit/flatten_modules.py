"""Replace modules that were pickled whole by their state dicts.

The keys of an object cannot be renamed, and a file of tensors alone holds no objects. So if keys
are renamed, or only a model's weights are wanted, the state dict replaces the module.
"""

from __future__ import annotations

from ...errors import RefusedError
from ...pickles.nodes import Call, Global, List, Node, Set, Text, Tuple
from ...pickles.nodes import Mapping as MappingNode
from ...torch_pickle.pickled_modules import is_module, state_of
from ...torch_pickle.values.tensors import Recogniser
from ..draft import CheckpointGraph
from ..traversal import Composite, nodes_of


def flatten(draft: CheckpointGraph) -> list[str]:
    """Replace the outermost modules of a draft; return the names of tensors left out.

    RefusedError if a module has extremely many names, or no tensor would be left.
    """
    if not any(is_module(node) for node in nodes_of(draft.graph.root)):
        return []
    contents = draft.list_contents()
    draft.warnings += contents.doubts.sentences()
    listed = list(zip(contents.tensors, contents.nodes, strict=True))
    flattening = _Flattening(Recogniser(draft.graph.ids))
    draft.graph.root = flattening.replaced(draft.graph.root)
    for _ in nodes_of(draft.graph.root, flattening.enter):
        pass  # each was entered
    held = {id(node) for entry, node in listed if not entry.beside}
    if listed and not held:
        raise RefusedError(
            f"no tensor would be left: its module does not hold {listed[0][0].name!r} in its "
            "state dict",
            hint="convert it without --bare and without new names",
        )
    return [
        entry.name
        for entry, node in listed
        if entry.beside and entry.part_of is None and id(node) not in held
    ]


class _Flattening:
    def __init__(self, recogniser: Recogniser) -> None:
        self.recogniser = recogniser
        self.new: dict[int, tuple[Node, Node]] = {}  # keeps the old nodes, so that no id is reused

    def enter(self, node: Composite) -> None:
        """Replace the children of a node."""
        if isinstance(node, Call):
            node.args, node.state = self.replaced(node.args), self.replaced(node.state)
        if isinstance(node, MappingNode):
            node.pairs = [(key, self.replaced(value)) for key, value in node.pairs]
        if isinstance(node, (Tuple, List, Set, Call)):
            node.items = [self.replaced(each) for each in node.items]

    def replaced(self, node: Node) -> Node:
        if not isinstance(node, Call) or not is_module(node):
            return node
        if id(node) not in self.new:
            self.new[id(node)] = node, self.state_dict(node)
        return self.new[id(node)][1]

    def state_dict(self, module: Call) -> Call:
        """Return the result of `Module.state_dict`, only with tensors."""
        found = Call(Global("collections", "OrderedDict", 0), Tuple([], 0), "REDUCE", 0)
        found.pairs = [
            (Text(name, 0), value)
            for name, value in state_of(module)
            if isinstance(value, Call) and self.recogniser.tensor(value) is not None
        ]
        return found
