"""Find the models in a checkpoint, and their averaged weights (EMA, SWA).

A model is found by evidence, as sections are (`sections.sections`, `sections.averages`). If there
are several, the one at the top under a common name is taken. Otherwise it is unknown which one is
meant (generator or discriminator?), and the error names them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...display.phrases import join_names, plural
from ...errors import RefusedError, UsageError
from ...manifest.manifest import Section, TensorEntry
from ...manifest.paths import Path, spell
from ...pickles.nodes import Call, Dict, Global, List, Mapping, Node, Text, Tuple
from ...torch_pickle.children import children_of
from ...torch_pickle.listed_tensors import PickleContents
from ...torch_pickle.sections.averages import COPY, model_names, speaks_of_average
from ...torch_pickle.sections.sections import holds_weights, is_module_state
from ..patterns import covers
from .subtree import beside, rename_keys, way_to

#: The allowed choices.
WEIGHTS = (Section.MODEL.value, Section.EMA.value)
_USUAL = {
    *("state_dict", "model", "model_state_dict", "model_state", "model_dict", "model_weights"),
    *("current_model_state", "module", "net", "net_state_dict", "network", "params", "weights"),
}
#: The model's key beside its criterion, which may have weights too; skorch/net.py, `__getstate__`.
_OF_SKORCH = ("__cuda_dependent_attributes__", "module_")
_MAYBE = (Section.MODEL, Section.EMA, Section.OTHER)  # may be weights
_MOST_TOLD = 8  # models
_MOST_PLACES = 4
_BUFFERS = {"running_mean", "running_var", "num_batches_tracked"}
_FLOATING = {"float16", "bfloat16", "float32", "float64"}
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_WRAPPED = "module."


@dataclass
class Weights:
    """The weights of one model in a checkpoint, or their averages."""

    #: the path of their container
    path: Path
    #: `Section.MODEL` or `Section.EMA`
    section: Section
    #: the prefix of their names, if the state dict holds other tensors too
    head: str = ""
    #: entry and node of each tensor
    held: list[tuple[TensorEntry, Node]] = field(default_factory=list)
    #: the model's name for each; None if it is not a weight
    names: list[str | None] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The dotted name of their container."""
        path = (*self.path, self.head) if self.head else self.path
        return spell(path)

    def __str__(self) -> str:
        return f"{self.name} ({plural(self.count, 'tensor')})"

    @property
    def nameless(self) -> bool:
        """Whether they are a list, so that the model's names are unknown."""
        return self.held[0][0].state_key is None and all(
            name is not None and name.isdecimal() for name in self.names
        )

    @property
    def count(self) -> int:
        """The number of weights."""
        return sum(name is not None for name in self.names)


def weights_in(contents: PickleContents) -> list[Weights]:
    """Return the weights of each model, and their averages, in the order of the checkpoint."""
    found: dict[tuple[Section, Path, str], Weights] = {}
    models: dict[Path, Weights] = {}
    for entry, node, depth in zip(
        contents.tensors, contents.nodes, contents.weights_at, strict=True
    ):
        if entry.section not in (Section.MODEL, Section.EMA) or entry.part_of is not None:
            continue
        path = entry.path[: min(1, len(entry.path) - 1) if depth is None else depth]
        head = _head(entry, path) if entry.section is Section.EMA else ""
        each = found.setdefault((entry.section, path, head), Weights(path, entry.section, head))
        each.held.append((entry, node))
        if entry.section is Section.MODEL:
            each.names.append(None if entry.beside else _own_name(entry, path))
            models[path] = each
    for each in found.values():
        if each.section is Section.EMA:
            told = iter(_names_of_averages(each, models))
            each.names = [None if entry.beside else next(told) for entry, _ in each.held]
        elif each.path and speaks_of_average(each.path[-1]):  # swapped with its average
            own = [name for name in each.names if name is not None]
            if own and all(name.startswith(f"{COPY}.") for name in own):
                each.head = COPY
                named = {name: name.removeprefix(f"{COPY}.") for name in own}
            else:
                named = model_names(own, ())
            each.names = [None if name is None else named.get(name) for name in each.names]
    return [each for each in found.values() if each.count]


def _own_name(entry: TensorEntry, path: Path) -> str:
    return entry.state_key or spell(entry.path[len(path) :])


def _head(entry: TensorEntry, path: Path) -> str:
    """Return the prefix of an average's names in the state dict of its model, if it is in it."""
    keys = (entry.state_key or "").split(".")[:-1]
    first = keys[:1] if len(entry.path) == len(path) + 1 else keys
    spoken = next((n for n, key in enumerate(first, 1) if speaks_of_average(key)), 0)
    if spoken and spoken < len(keys) and speaks_of_average(keys[spoken]):
        spoken += 1  # `ema.ema_model.…` of ema-pytorch, beside `ema.online_model.…`
    return ".".join(keys[:spoken])


def _parameters(model: Weights) -> list[tuple[str, tuple[int, ...]]]:
    """Return the known names and shapes of parameters: lists hold no buffers."""
    return [
        (name, entry.shape)
        for (entry, _), name in zip(model.held, model.names, strict=True)
        if name is not None and name.rpartition(".")[2] not in _BUFFERS and entry.dtype in _FLOATING
    ]


def _names_of_averages(averages: Weights, models: dict[Path, Weights]) -> list[str | None]:
    """Return the known names of averages inside the model's state dict."""
    entries = [entry for entry, _ in averages.held if not entry.beside]
    if not entries:
        return []
    names = [_own_name(entry, averages.path) for entry in entries]
    if entries[0].state_key is None:  # a list: only its order tells the names
        in_order = [_parameters(each) for each in models.values()]
        shapes = [entry.shape for entry in entries]
        alike = [each for each in in_order if [shape for _, shape in each] == shapes]
        return [name for name, _ in alike[0]] if len(alike) == 1 else list(names)
    around = models.get(averages.path) if averages.head else None
    beside = [around] if around is not None else list(models.values())
    known = {name for each in beside for name in each.names if name is not None}
    bare = [name.removeprefix(f"{averages.head}.") for name in names]
    own = [name for name in bare if not name.startswith(f"{COPY}.")]
    told = model_names(own, known, averages.head)
    return [told.get(name) for name in bare]


def one_of(contents: PickleContents, section: Section, within: Path = ()) -> Weights:
    """Return the weights of the intended model, or their averages, in a part of the checkpoint.

    RefusedError if there are none, or several models could be meant.
    """
    found = [each for each in weights_in(contents) if each.path[: len(within)] == within]
    wanted = [each for each in found if each.section is section]
    if within and not wanted:
        wanted = found  # a named entry is taken in any section
    if not wanted:
        raise _none(contents, found, section)
    usual = [each for each in wanted if _is_usual(each.path[len(within) :])]
    tops = {each.path[: len(within) + 1] for each in usual}
    if len(tops) == 1:
        wanted = usual
    if all(_is_same(each, wanted[0]) for each in wanted):
        return wanted[0]
    if len(tops) == 1:
        return _together(wanted, next(iter(tops)))
    raise _several(wanted, section)


def one_called(contents: PickleContents, name: str) -> Weights | None:
    """Return the weights of the only model with this name; None if there are several or none.

    RefusedError if the name is that of a list of several models.
    """
    found = [
        each
        for each in weights_in(contents)
        if each.section is Section.MODEL and covers(name, each.name)
    ]
    if not found or len({each.path[:1] for each in found}) > 1:
        return None
    return found[0] if len(found) == 1 else _together(found, found[0].path[:1])


def _several(found: Sequence[Weights], section: Section) -> RefusedError:
    names = [each.name for each in found]
    what = "models" if section is Section.MODEL else "averages of weights"
    return RefusedError(
        f"it holds several {what}: {join_names([str(each) for each in found], _MOST_TOLD)}",
        hint=f"--root '{names[0]}' takes one, --select '{names[0]}' --select '{names[1]}' several",
    )


def _is_usual(path: Path) -> bool:
    named = bool(path) and isinstance(path[0], str) and path[0] in _USUAL
    return named or path[:2] == _OF_SKORCH


def _is_same(one: Weights, other: Weights) -> bool:
    """Whether these are the same tensors under the same names."""
    if one.names != other.names:
        return False
    looks = [
        [(e.storage, e.offset, e.shape, e.stride, e.dtype) for e, _ in each.held]
        for each in (one, other)
    ]
    return looks[0] == looks[1]


def _together(parts: Sequence[Weights], path: Path) -> Weights:
    """Join the parts of one model from several dicts; RefusedError for a list of models."""
    if any(isinstance(key, int) for part in parts for key in part.path[len(path) :]):
        raise _several(parts, parts[0].section)
    whole = Weights(path, parts[0].section)
    for part in parts:
        start = spell(part.path[len(path) :]) + "." if len(part.path) > len(path) else ""
        whole.held += part.held
        whole.names += [None if name is None else f"{start}{name}" for name in part.names]
    return whole


# -- taking them ------------------------------------------------------------------------------


def state_of(
    weights: Weights, root: Node, left: PickleContents, within: Path
) -> tuple[Node, list[str]]:
    """Return the state dict of these weights, with the model's names, and the names left out.

    `root`, with the path `within`, is the remaining tree, and `left` lists its content; its nodes
    may be changed.
    """
    wanted = {
        (_without_numbers(entry.path), id(node)): name
        for (entry, node), name in zip(weights.held, weights.names, strict=True)
        if name is not None
    }
    start = f"{spell(within)}." if within else ""
    held: list[tuple[Path, str, Node]] = []
    rest: list[tuple[Path, str]] = []
    for entry, node in zip(left.tensors, left.nodes, strict=True):
        path = (*within, *entry.path)
        name = wanted.get((_without_numbers(path), id(node)))
        if name is not None:
            held.append((path, name, node))
        elif path[: len(weights.path)] == weights.path and entry.part_of is None:
            rest.append((path, start + entry.name))
    way = way_to(root, weights.path[len(within) :])
    gone = [f"{start}{name}" for name in beside(way)]
    holder = way[-1][0] if way else None
    depth = len(weights.path) + 1
    flat = isinstance(holder, (Call, Dict)) and bool(holder.pairs) and holds_weights(holder)
    if isinstance(holder, (Call, Dict)) and flat and all(len(each) == depth for each, _, _ in held):
        names = {str(path[-1]): name for path, name, _ in held}
        _leave(holder, names, {id(node) for node in left.nodes}, alone=bool(weights.head))
        return holder, gone + [name for _, name in rest]
    if isinstance(holder, (Call, Dict, List, Tuple)) and not _is_module(holder):
        for keys, _ in children_of(holder):
            inner = (*weights.path, *keys)
            if not any(path[: len(inner)] == inner for path, _, _ in held):
                gone.append(spell(inner))
                rest = [each for each in rest if each[0][: len(inner)] != inner]
    state = Call(Global("collections", "OrderedDict", 0), Tuple([], 0), "REDUCE", 0)
    state.pairs = [(Text(name, 0), _plain(node)) for _, name, node in held]
    return state, gone + [name for _, name in rest]


def _is_module(node: Node) -> bool:
    return isinstance(node, Call) and not node.pairs and is_module_state(node)


def _leave(state: Mapping, names: dict[str, str], tensors: set[int], *, alone: bool) -> None:
    """Keep only these tensors, renamed; with `alone`, also drop values that are not tensors."""
    state.pairs = [
        (key, value)
        for key, value in state.pairs
        if (isinstance(key, str) and key in names) or not (alone or id(value) in tensors)
    ]
    if any(name != new for name, new in names.items()):
        wrapped = all(new == name.removeprefix(_WRAPPED) for name, new in names.items())
        start = _WRAPPED if wrapped else ""
        rename_keys([state], lambda key: names.get(key, key.removeprefix(start)))


def _plain(node: Node) -> Node:
    """Return a tensor in the form of a state dict, not as a parameter."""
    if isinstance(node, Call) and node.qualname in _PARAMETERS and isinstance(node.args, Tuple):
        return node.args.items[0]
    return node


def _without_numbers(path: Path) -> Path:
    """Return a path without list indices, which change when other items are removed."""
    return tuple(key for key in path if not isinstance(key, int))


class NoWeights(RefusedError):
    """Raised if there are no weights: every tensor is known to be something else."""


def _none(contents: PickleContents, found: Sequence[Weights], section: Section) -> RefusedError:
    what = "weights of a model" if section is Section.MODEL else "averages of weights (EMA)"
    others = [each for each in found if each.section is not section]
    if others:
        kind = others[0].section.value
        return RefusedError(
            f"it holds no {what}; {places_of(others)}", hint=f"--weights {kind} takes these"
        )
    doubts = contents.doubts.sentences()
    hint = doubts[0] if doubts else "ckptmove inspect lists them" if contents.tensors else None
    many = len(contents.tensors)
    among = f" among its {plural(many, 'tensor')}" if many else ""
    unknown = doubts or contents.loose or any(each.section in _MAYBE for each in contents.tensors)
    kind_of_error = RefusedError if unknown else NoWeights
    return kind_of_error(f"it holds no {what}{among}", hint=hint)


def places_of(found: Sequence[Weights]) -> str:
    """Return a sentence that says where weights are."""
    what = {
        Section.MODEL: "weights of a model",
        Section.EMA: "averages of weights (EMA)",
    }
    if len(found) == 1 and not (found[0].path or found[0].head):
        return f"its {plural(found[0].count, 'tensor')} are {what[found[0].section]}"
    told = [f"{each.name!r} ({plural(each.count, 'tensor')})" for each in found]
    kinds = {each.section for each in found}
    kind = what[found[0].section] if len(kinds) == 1 else "weights"
    return f"{kind} are under {join_names(told, _MOST_PLACES)}"


def section_asked(weights: str) -> Section:
    """Return the section with this name; UsageError if it is not one of the choices."""
    if weights not in WEIGHTS:
        raise UsageError(f"weights is one of {', '.join(WEIGHTS)}, not {weights!r}")
    return Section(weights)
