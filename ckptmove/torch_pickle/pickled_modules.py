"""Find which attributes of a whole pickled module are in its state dict, and their names there.

`Module.state_dict` returns parameters, then buffers, then those of submodules, under dotted names:
the weight of the first module of a Sequential is `0.weight`, but its path in the pickle is
`_modules.0._parameters.weight`. Non-persistent buffers and all other attributes are left out. A
module that is registered twice is in it twice.

Source: torch/nn/modules/module.py (`state_dict`, `_save_to_state_dict`); torch/fx/graph_module.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from ..display.phrases import few
from ..errors import RefusedError
from ..manifest.paths import Path, spell
from ..pickles.nodes import Call, Dict, Global, List, Mapping, Node, Set, Tuple

#: The attributes that make up a state dict, in its order.
FRAME = ("_parameters", "_buffers", "_modules")
_KEYS = frozenset(FRAME)
#: The attribute with the names of the buffers that are left out.
PASSING = "_non_persistent_buffers_set"
_SETS = ("builtins.set", "builtins.frozenset")
#: Functions with which torch.fx makes its modules, from their attributes and code.
_OF_FX = {
    f"torch.fx.graph_module.reduce_{kind}graph_module" for kind in ("", "package_", "deploy_")
}
_COMPILED = "torch._dynamo.eval_frame.OptimizedModule"
#: The attribute of an OptimizedModule that holds the module.
INNER = "_orig_mod"
_MOST = 1 << 18  # names in a module; a module may occur under many


def attributes_of(node: Node) -> Mapping | None:
    """The attributes of a module that was pickled whole; None for any other node."""
    if not isinstance(node, Call):
        return None
    found = body_of(node)
    states = node.state.items if isinstance(node.state, Tuple) else [node.state]
    for state in states if found is None else [found]:
        if isinstance(state, Mapping) and state.keys_among(_KEYS) == _KEYS:
            return state
    return None


def is_module(node: Node) -> bool:
    """Whether the node is a module that was pickled whole."""
    return attributes_of(node) is not None or (isinstance(node, Call) and is_compiled(node))


def is_compiled(node: Call) -> bool:
    """Whether the node is the result of torch.compile; its first argument is the module."""
    items = node.args.items if isinstance(node.args, Tuple) else []
    return node.qualname == _COMPILED and bool(items) and attributes_of(items[0]) is not None


def body_of(node: Call) -> Dict | None:
    """The attributes that torch.fx passes as an argument."""
    if node.qualname not in _OF_FX or not isinstance(node.args, Tuple):
        return None
    bodies = [each for each in node.args.items if isinstance(each, Dict)]
    return bodies[0] if bodies else None


def is_frame(keys: Path) -> bool:
    """Whether keys inside a module lead to one of the attributes that make up its state dict."""
    return len(keys) == 1 and keys[0] in _KEYS


def passing_of(attributes: Mapping) -> frozenset[str]:
    """The names of a module's buffers that its state dict leaves out."""
    node = attributes.get(PASSING)
    if isinstance(node, Call) and node.qualname in _SETS and isinstance(node.args, Tuple):
        node = node.args.items[0] if node.args.items else None
    items = node.items if isinstance(node, (Set, List)) else []
    return frozenset(str(item) for item in items if isinstance(item, str))


def state_of(module: Call) -> Iterator[tuple[str, Node]]:
    """The names and tensors in the state dict of a module, in its order.

    RefusedError if there are far too many, since modules may occur under many names.
    """
    room = _MOST
    todo: list[tuple[str, Node, tuple[int, ...]]] = [("", module, ())]
    while todo:
        prefix, node, above = todo.pop()
        if isinstance(node, Call) and is_compiled(node) and isinstance(node.args, Tuple):
            todo.append((f"{prefix}{INNER}.", node.args.items[0], above))
            continue
        attributes = attributes_of(node)
        if attributes is None or id(node) in above:
            continue
        passing = passing_of(attributes)
        for frame in FRAME[:2]:
            for key, value in _pairs_of(attributes, frame):
                room -= 1
                if value is not None and not (frame == "_buffers" and key in passing):
                    yield prefix + key, value
        modules = list(_pairs_of(attributes, "_modules"))
        room -= len(modules)
        if room < 0:
            raise RefusedError("its modules have too many names")
        inner = (*above, id(node))
        todo.extend((f"{prefix}{key}.", child, inner) for key, child in reversed(modules))


def _pairs_of(attributes: Mapping, frame: str) -> Iterator[tuple[str, Node]]:
    held = attributes.get(frame)
    for key, value in held.pairs if isinstance(held, Mapping) else []:
        if isinstance(key, str):
            yield str(key), value


class Way(NamedTuple):
    """Which modules a path leads through, and what this means for the names below it."""

    #: `id()` of the modules on the path
    above: tuple[int, ...] = ()
    #: the indexes of keys in the path that are not part of names, as in state dicts
    elided: tuple[int, ...] = ()
    #: whether the path leads through something that a state dict leaves out
    beside: bool = False
    #: directly inside the buffers of a module: the names that its state dict leaves out
    passing: frozenset[str] = frozenset()
    #: whether the path leads through a module that occurs again, under another name
    again: bool = False


def name_of(path: Path, way: Way | None, start: int = 0) -> str:
    """The name for a path, from the key `start` on; in modules, the name in the state dict."""
    if way is None or not way.elided:
        return spell(path[start:])
    return spell(tuple(key for n, key in enumerate(path) if n >= start and n not in way.elided))


#: The children of a container: keys, node and way.
Inside = list[tuple[Path, Node, Way]]


def inside_module(
    node: Call, attributes: Mapping, depth: int, way: Way, inside: Sequence[tuple[Path, Node]]
) -> tuple[Inside, Inside]:
    """Divide the children of a module: those in its state dict, in its order, and all others.

    `depth` is how many keys lead to the module.
    """
    own = way._replace(above=(*way.above, id(node)), passing=frozenset())
    within = own._replace(elided=(*own.elided, depth))
    ways = {frame: within for frame in FRAME}
    ways["_buffers"] = within._replace(passing=passing_of(attributes))
    beside = own._replace(beside=True)
    state = [(keys, child, ways[str(keys[0])]) for keys, child in inside if is_frame(keys)]
    rest = [(keys, child, beside) for keys, child in inside if not is_frame(keys)]
    return sorted(state, key=lambda each: FRAME.index(str(each[0][0]))), rest


def inside_buffers(way: Way, inside: Iterable[tuple[Path, Node]]) -> Inside:
    """The children of a module's buffers.

    For those that its state dict leaves out, `beside` is set.
    """
    held = way._replace(passing=frozenset())
    beside = held._replace(beside=True)
    return [(keys, each, beside if keys[-1] in way.passing else held) for keys, each in inside]


_MOST = 1000  # the most names that are stored for each kind; a file may have any number
_LAZY = ("torch.nn.parameter.UninitializedParameter", "torch.nn.parameter.UninitializedBuffer")
_QUANTIZED = ("torch.ao.nn.quantized.", "torch.nn.quantized.", "torch.ao.nn.intrinsic.quantized.")
#: This hook only records a version: torch/nn/utils/spectral_norm.py.
_HARMLESS = "torch.nn.utils.spectral_norm.SpectralNormStateDictHook"


class Doubt(Enum):
    """A reason why a state dict is unknown.

    A class that overrides `state_dict`, or has `get_extra_state`, can't be recognized from the
    file. Source: torch/nn/modules/module.py (`_state_dict_hooks`); torch/nn/parameter.py; torch/ao.
    """

    LAZY = "lazy modules have no values yet, and a state dict made of this file leaves them out: {}"
    HOOKED = "hooks may change the names in the state dict of {}"
    OWN = "modules that save their state in a special form have no names of a state dict: {}"


class StateDictDoubts:
    """The modules whose state dict is unknown."""

    def __init__(self) -> None:
        self._found: dict[Doubt, list[str]] = {}

    def note(self, doubt: Doubt, name: str) -> None:
        """Record the name of a module or entry with this doubt."""
        names = self._found.setdefault(doubt, [])
        if len(names) < _MOST:
            names.append("the whole model" if name == spell(()) else name)

    def sentences(self) -> list[str]:
        """A warning for each kind of doubt."""
        return [doubt.value.format(few(names)) for doubt, names in self._found.items()]


def doubt_within(node: Node, frame: str | None) -> Doubt | None:
    """Why this node makes the state dict of a module unknown; None if it does not.

    `frame`: the name from `FRAME` that holds the node directly within a module; None for anything
    else.
    """
    if not isinstance(node, Call):
        return None
    if frame == FRAME[2] and not is_module(node):
        return Doubt.OWN
    return Doubt.LAZY if frame in FRAME[:2] and node.qualname in _LAZY else None


def is_packed(module: Call) -> bool:
    """Whether a module is quantized and packs its weights into an object of torch."""
    return (module.qualname or "").startswith(_QUANTIZED)


def is_hooked(attributes: Mapping) -> bool:
    """Whether hooks change the state dict of a module with these attributes."""
    for key in ("_state_dict_hooks", "_state_dict_pre_hooks"):
        hooks = attributes.get(key)
        for _, hook in hooks.pairs if isinstance(hooks, Mapping) else []:
            if isinstance(hook, (Call, Global)) and hook.qualname != _HARMLESS:
                return True
    return False
