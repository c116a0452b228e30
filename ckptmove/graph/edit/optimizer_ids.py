"""Identify parameters of optimizers by numbers, as `Optimizer.load_state_dict` needs, or by names.

    {state: {0: {exp_avg, …}, …}, param_groups: [{lr, …, params: [0, …]}, …]}    state_dict()
    {state: {"fc.weight": {…}}, param_groups: [{…, params: ["fc.weight", …]}]}   get_state_dict()
    {"state.fc.weight.exp_avg": …, "param_groups.fc.weight.lr": …}               the same, flattened

Numbers count the parameters over all groups, in the order of the optimizer; both forms list them in
this order. The flattened form has no groups: parameters with equal options are grouped again. The
name for a number is known only from `param_names` in the groups (torch 2.6 and newer), or from the
shapes of the state and the order of the model's parameters, if only one assignment fits.

Source: torch/optim/optimizer.py; torch/distributed/checkpoint/state_dict.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from ...display.phrases import plural
from ...errors import RefusedError
from ...manifest.manifest import Section
from ...pickles.nodes import Call, Dict, List, Mapping, Node, Tuple
from ..draft import CheckpointGraph
from ..plain_tensors import data_of
from ..traversal import nodes_of

OptimizerIds = Literal["int", "name"]
_STATE, _GROUPS, _PARAMS, _NAMES = "state", "param_groups", "params", "param_names"
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
Shape = tuple[int, ...]


def groups_of(optimizer: Mapping) -> list[Mapping] | None:
    """Return the groups of an optimizer's state dict; None for other values."""
    groups = optimizer.get(_GROUPS)
    items = groups.items if isinstance(groups, List) else []
    found: list[Mapping] = [each for each in items if isinstance(each, Mapping)]
    known = len(found) == len(items) and all(isinstance(g.get(_PARAMS), List) for g in found)
    return found if found and known else None


def params_of(optimizer: Mapping) -> list[Node] | None:
    """Return the identifiers of an optimizer's parameters; None if it is not an optimizer."""
    groups = groups_of(optimizer)
    if groups is None:
        return None
    lists = [group.get(_PARAMS) for group in groups]
    return [each for params in lists if isinstance(params, List) for each in params.items]


def call_parameters(draft: CheckpointGraph, ids: OptimizerIds) -> None:
    """Convert the identifiers in all optimizers of a draft; warns if there is no optimizer.

    RefusedError if a name or number can't be known.
    """
    found = 0
    for node in list(nodes_of(draft.graph.root)):
        if not isinstance(node, Mapping):
            continue
        if isinstance(node, Dict) and _is_flat(node):
            if ids == "int":
                _group(draft, node)
                found += 1
        elif params_of(node):
            found += 1
        else:
            continue
        params = params_of(node)
        if params is not None:
            _call(draft, node, params, ids)
    if not found:
        draft.warnings.append("no optimizer was found whose parameters could be called otherwise")


def group_flattened(draft: CheckpointGraph) -> None:
    """Restore state and groups of flattened optimizers in a draft, by name."""
    for node in list(nodes_of(draft.graph.root)):
        if isinstance(node, Dict) and _is_flat(node):
            _group(draft, node)


def _call(draft: CheckpointGraph, node: Mapping, params: list[Node], ids: OptimizerIds) -> None:
    wanted: type = int if ids == "int" else str
    if all(isinstance(each, wanted) and type(each) is not bool for each in params):
        return
    known = [str(each) if isinstance(each, str) else each for each in params]
    if len(set(map(repr, known))) != len(known):
        raise RefusedError("an optimizer names a parameter twice in its groups")
    new: Sequence[int | str] = range(len(known)) if ids == "int" else _names(draft, node, known)
    said = dict(zip(map(repr, known), new, strict=True))
    state = node.get(_STATE)
    if isinstance(state, Mapping):
        strange = [key for key, _ in state.pairs if _key(key) not in said]
        if strange:
            raise RefusedError(
                f"the optimizer has a state of {strange[0]!s:.100}, which is in none of its groups"
            )
        state.pairs = [(_node(draft, said[_key(key)]), value) for key, value in state.pairs]
    for group in groups_of(node) or ():
        listed = group.get(_PARAMS)
        assert isinstance(listed, List)
        listed.items = [_node(draft, said[_key(each)]) for each in listed.items]


def _key(node: Node) -> str:
    return repr(str(node) if isinstance(node, str) else node)


def _node(draft: CheckpointGraph, key: int | str) -> Node:
    return draft.graph.text(key) if isinstance(key, str) else key


# -- names of numbers ------------------------------------------------------------------------------


def _names(draft: CheckpointGraph, node: Mapping, numbers: Sequence[Node]) -> list[str]:
    """Return the names of the parameters that an optimizer numbers."""
    groups = groups_of(node) or []
    told = [group.get(_NAMES) for group in groups]
    lists = [each.items for each in told if isinstance(each, List)]
    names = [str(name) for items in lists for name in items if isinstance(name, str)]
    if len(names) == len(numbers) == len(set(names)) and len(lists) == len(groups):
        return names
    state = node.get(_STATE)
    shapes = [_shape(draft, state, number) for number in numbers]
    sizes = [len(each.items) for each in map(_params, groups)]
    candidates = _candidates(draft)
    if not candidates:
        raise RefusedError(
            "the names of an optimizer's parameters can't be known: it has no model beside it, or "
            "several",
            hint="keep the numbers, or --select one model and its optimizer",
        )
    found = _in_order(shapes, candidates) if len(groups) == 1 else None
    if found is None:
        found = _by_shape(shapes, sizes, candidates)
    if found is None:
        raise RefusedError(
            f"the names of {plural(len(numbers), 'parameter')} of an optimizer can't be known for "
            f"sure from {plural(len(candidates), 'tensor')} of the model",
            hint="keep the numbers; or save it with get_optimizer_state_dict, which names them",
        )
    return found


def _params(group: Mapping) -> List:
    params = group.get(_PARAMS)
    assert isinstance(params, List)
    return params


def _shape(draft: CheckpointGraph, state: Node, number: Node) -> Shape | None:
    """Return the shape of a parameter, as far as its state tells."""
    pairs = state.pairs if isinstance(state, Mapping) else []
    held = next((value for key, value in pairs if type(key) is int and key == number), None)
    values = [value for _, value in held.pairs] if isinstance(held, Mapping) else []
    shapes = {shape for value in values if (shape := _shape_of(draft, value))}
    return next(iter(shapes)) if len(shapes) == 1 else None


def _shape_of(draft: CheckpointGraph, node: Node) -> Shape | None:
    data = data_of(node)
    tensor = draft.graph.recogniser.tensor(data) if isinstance(data, Call) else None
    return None if tensor is None else tensor.shape


def _candidates(draft: CheckpointGraph) -> list[tuple[str, Shape]]:
    """Return the model's possible parameters, in order; only the first of tied tensors.

    Empty if several models may be meant.
    """
    found: list[tuple[str, Shape]] = []
    homes, met = set[object](), set[object]()
    for each in draft.list_contents().tensors:
        if each.section is not Section.MODEL or each.part_of is not None:
            continue
        homes.add(each.path[:-1])
        same = each.storage, each.offset, each.shape
        if "float" in each.dtype and each.path[-1] and same not in met:
            met.add(same)
            name = str(each.path[-1])
            if not name.endswith(_BUFFERS):
                found.append((name, each.shape))
    return found if len(homes) == 1 else []


def _in_order(
    shapes: Sequence[Shape | None], candidates: Sequence[tuple[str, Shape]]
) -> list[str] | None:
    """Return the names of parameters in the order of the model, if only one assignment fits."""
    first = _leftmost(shapes, candidates)
    last = _leftmost(shapes[::-1], candidates[::-1])
    return first if first is not None and last is not None and first == last[::-1] else None


def _leftmost(
    shapes: Iterable[Shape | None], candidates: Iterable[tuple[str, Shape]]
) -> list[str] | None:
    left, names = iter(candidates), list[str]()
    for shape in shapes:
        name = next((name for name, other in left if shape in (None, other)), None)
        if name is None:
            return None
        names.append(name)
    return names


def _by_shape(
    shapes: Sequence[Shape | None], sizes: Sequence[int], candidates: Sequence[tuple[str, Shape]]
) -> list[str] | None:
    """Return the names of parameters in several groups, if all of one shape are in one group."""
    group_of = [n for n, size in enumerate(sizes) for _ in range(size)]
    names: list[str | None] = [None] * len(shapes)
    for shape in set(shapes):
        mine = [n for n, each in enumerate(shapes) if each == shape]
        named = [name for name, each in candidates if each == shape]
        if shape is None or len(named) != len(mine) or len({group_of[n] for n in mine}) > 1:
            return None
        for n, name in zip(mine, named, strict=True):
            names[n] = name
    return [name for name in names if name is not None]


# -- what was flattened ----------------------------------------------------------------------------


def _is_flat(node: Dict) -> bool:
    """Whether a dict is a flattened optimizer: each value has its own key."""
    keys = [str(key) if isinstance(key, str) else "" for key, _ in node.pairs]
    return any(key.startswith(f"{_GROUPS}.") for key in keys) and all(
        key.startswith((f"{_STATE}.", f"{_GROUPS}.")) for key in keys
    )


def _group(draft: CheckpointGraph, node: Dict) -> None:
    """Restore the state and groups of a flattened optimizer."""
    text = draft.graph.text
    options: dict[str, list[tuple[str, Node]]] = {}
    for key, value in node.pairs:
        if str(key).startswith(f"{_GROUPS}."):
            name, _, option = str(key)[len(_GROUPS) + 1 :].rpartition(".")
            options.setdefault(name, []).append((option, value))
    states: dict[str, Dict] = {}
    for key, value in node.pairs:
        if not str(key).startswith(f"{_STATE}."):
            continue
        name, _, what = str(key)[len(_STATE) + 1 :].rpartition(".")
        if name not in options:
            raise RefusedError(f"the optimizer has a state of {name:.100}, which is in no group")
        states.setdefault(name, Dict()).pairs.append((text(what), value))
    groups: dict[object, Dict] = {}
    for name, pairs in options.items():
        pairs = [pair for pair in pairs if pair[0] != _PARAMS]
        alike = tuple(sorted((option, _comparable(value)) for option, value in pairs))
        if alike not in groups:
            groups[alike] = Dict()
            groups[alike].pairs = [(text(option), value) for option, value in pairs]
            groups[alike].pairs.append((text(_PARAMS), List([])))
        _params(groups[alike]).items.append(text(name))
    state = Dict()
    state.pairs = [(text(name), each) for name, each in states.items()]
    listed = List(list(groups.values()))
    node.pairs = [(text(_STATE), state), (text(_GROUPS), listed)]
    draft.warnings.append(
        "an optimizer was flattened, without its groups: parameters with equal options are "
        f"{plural(len(groups), 'group')} now"
    )


def _comparable(node: Node) -> str:
    """Return a key by which two options are compared."""
    if isinstance(node, (Tuple, List)):
        return f"({', '.join(map(_comparable, node.items))})"
    if node is None or isinstance(node, (bool, int, float, str)):
        return f"{type(node).__name__} {node}"
    return f"at {id(node)}"
