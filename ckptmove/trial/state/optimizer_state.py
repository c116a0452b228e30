"""Rebuild an optimizer from its saved state: its class, its groups, and its tensors.

torch/optim/*.py defines the state of optimizers. A class is recognized by the hyper-parameters in
its groups, which are its own `defaults`, and by the keys of its state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ...display.phrases import join_names, plural
from ...errors import UsageError

#: Keys of state tensors that have the shape of their parameter.
SHAPED = frozenset(
    (
        *("acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq"),
        *("momentum_buffer", "prev", "square_avg", "step_size", "sum", "variance"),
    )
)
#: The state that a step needs, by class.
_NEEDED = {
    "Adam": {"step", "exp_avg", "exp_avg_sq"},
    "AdamW": {"step", "exp_avg", "exp_avg_sq"},
    "NAdam": {"step", "mu_product", "exp_avg", "exp_avg_sq"},
    "RAdam": {"step", "exp_avg", "exp_avg_sq"},
    "Adamax": {"step", "exp_avg", "exp_inf"},
    "Adagrad": {"step", "sum"},
    "Adadelta": {"step", "square_avg", "acc_delta"},
    "RMSprop": {"step", "square_avg"},
    "Rprop": {"step", "prev", "step_size"},
    "ASGD": {"step", "eta", "mu", "ax"},
    "SparseAdam": {"step", "exp_avg", "exp_avg_sq"},
    "Adafactor": {"step"},
    "SGD": set(),
    "Muon": {"momentum_buffer"},
    "LBFGS": set(),
}
#: Keys of groups that do not identify a class, such as the choice of an implementation; they differ
#: between versions of torch.
_MANNERS = frozenset(
    (
        *("params", "param_names", "initial_lr", "foreach", "fused", "capturable"),
        *("differentiable", "maximize"),
    )
)
_MOST_LISTED = 8


class UnrecognisedOptimizer(Exception):
    """The saved state is not that of any known optimizer."""


class Misfit(Exception):
    """The saved state does not belong to this model's parameters."""


@dataclass(frozen=True)
class Rebuilt:
    """An optimizer, with its state loaded."""

    optimizer: torch.optim.Optimizer
    #: Its class, and how the class is known.
    name: str
    #: The names of its parameters, by the number the checkpoint gives them.
    names: Mapping[Any, str]
    #: The numbers of parameters that have a saved state.
    saved: frozenset[Any]
    problems: Sequence[str]


def kind_of(state: Mapping[Any, Any]) -> tuple[type[torch.optim.Optimizer], str]:
    """The class of an optimizer, found by its state dict, and how it was found.

    Raises:
        Unrecognised: the class was not found.
        Misfit: the state dict has no parameter group.
    """
    if not state["param_groups"]:
        raise Misfit(
            f"it has no parameter group, but {plural(len(state['state']), 'state')} of parameters"
        )
    group = _hyper(state)
    slots = _slots(state)
    if "clip_threshold" in group:
        return _transformers_adafactor(), "by clip_threshold in its groups"
    keys = set(group) - _MANNERS
    scored = []
    for name, needed in _NEEDED.items():
        made = getattr(torch.optim, name, None)
        if made is None or (slots and not needed <= slots):
            continue
        own = _defaults(made)
        score = len(keys & own) / max(1, len(keys | own))
        scored.append((score, name == "AdamW", made))
    score, _, made = max(scored, key=lambda each: each[:2], default=(0.0, False, None))
    if made is None or score < 0.5:
        raise UnrecognisedOptimizer(
            f"its groups hold {join_names(sorted(map(str, keys)))}; "
            f"its state {join_names(sorted(slots))}"
        )
    if made in (torch.optim.Adam, torch.optim.AdamW):
        return _adam(group)
    return made, "by its groups" if not slots else "by its groups and state"


def _adam(group: Mapping[Any, Any]) -> tuple[type[torch.optim.Optimizer], str]:
    """Adam or AdamW, which differ only in the kind of weight decay."""
    if "decoupled_weight_decay" in group:
        apart = bool(group["decoupled_weight_decay"])
        made = torch.optim.AdamW if apart else torch.optim.Adam
        return made, f"by decoupled_weight_decay={apart}"
    decays = group.get("weight_decay", 0)
    if decays:
        return torch.optim.AdamW, f"or Adam; AdamW is used because of the weight decay {decays:g}"
    return torch.optim.Adam, "or AdamW, which is the same without weight decay"


def _transformers_adafactor() -> type[torch.optim.Optimizer]:
    try:
        from transformers.optimization import Adafactor
    except ImportError as error:
        raise UnrecognisedOptimizer(
            "it is the Adafactor of transformers, but transformers is not installed"
        ) from error
    found: type[torch.optim.Optimizer] = Adafactor
    return found


def _defaults(made: Callable[..., torch.optim.Optimizer]) -> set[str]:
    """The hyper-parameters of a class, without `_MANNERS`."""
    # Muon accepts only matrices.
    probe = made([torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))])
    return set(probe.defaults) - _MANNERS


def _hyper(state: Mapping[Any, Any]) -> Mapping[Any, Any]:
    groups = state["param_groups"]
    return groups[0] if groups else {}


def _slots(state: Mapping[Any, Any]) -> set[str]:
    """The keys of the state of all parameters."""
    held = (slots for slots in state["state"].values() if isinstance(slots, Mapping))
    return {str(key) for slots in held for key in slots}


# -- groups ----------------------------------------------------------------------------------------


def grouped_names(module: torch.nn.Module, state: Mapping[Any, Any]) -> list[list[str]]:
    """The names of the parameters of each group.

    The names in the groups are used, if present. Otherwise the groups have numbers: parameters are
    numbered through all groups, in the order of `module.parameters()` within each group. The group
    of each parameter is found by trying orders until all shapes fit: the model's order; matrices
    before vectors; or biases and norms last, as transformers does.

    Raises:
        Misfit: no such order fits.
    """
    groups = state["param_groups"]
    own = dict(module.named_parameters())
    given = [list(group.get("param_names") or ()) for group in groups]
    if all(given) and all(name in own for names in given for name in names):
        return given
    keyed = [list(group["params"]) for group in groups]
    if all(isinstance(key, str) and key in own for keys in keyed for key in keys):
        return keyed
    sizes = [len(keys) for keys in keyed]
    shapes = [_shape_of(state["state"].get(key)) for keys in keyed for key in keys]
    trained = sum(p.requires_grad for p in own.values())
    if sum(sizes) not in (len(own), trained):
        raise Misfit(
            f"it holds {plural(sum(sizes), 'parameter')}; the model has {len(own):,}"
            + (f", {trained:,} to be trained" if trained < len(own) else "")
            + "; the code of the model must freeze the frozen ones: requires_grad_(False)"
        )
    for order in _orders(own):
        if len(order) == sum(sizes) and all(
            shape is None or shape == tuple(own[name].shape)
            for name, shape in zip(order, shapes, strict=True)
        ):
            taken = iter(order)
            return [[next(taken) for _ in range(size)] for size in sizes]
    found = _by_shape(own, sizes, shapes)
    if found is not None:
        return found
    wrong = [
        f"{name} is {list(own[name].shape)}, its state {list(shape)}"
        for name, shape in zip(next(_orders(own)), shapes, strict=False)
        if shape is not None and shape != tuple(own[name].shape)
    ]
    raise Misfit(f"the shapes of its state do not match the parameters: {join_names(wrong, 3)}")


def _shape_of(slots: Any) -> tuple[int, ...] | None:
    """The shape of the parameter to which a state belongs, if the state shows it."""
    if isinstance(slots, Mapping):
        for key, value in slots.items():
            if key in SHAPED and isinstance(value, torch.Tensor):
                return tuple(value.shape)
    return None


def _orders(own: Mapping[str, torch.nn.Parameter]) -> Iterator[list[str]]:
    """The usual orders in which programs pass parameters to an optimizer."""
    trained = [name for name, parameter in own.items() if parameter.requires_grad]
    for names in (list(own), trained):
        yield names
        flat = {name for name in names if own[name].ndim < 2}
        plain = {name for name in names if name.endswith("bias") or "norm" in name.lower()}
        plain |= {name for name in flat if ".ln" in name or name.startswith("ln")}
        for last in (flat, plain):
            yield [n for n in names if n not in last] + [n for n in names if n in last]
            yield [n for n in names if n in last] + [n for n in names if n not in last]


def _by_shape(
    own: Mapping[str, torch.nn.Parameter],
    sizes: Sequence[int],
    shapes: Sequence[tuple[int, ...] | None],
) -> list[list[str]] | None:
    """Put each parameter in the first group whose next shape fits; None if this fails."""
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    found: list[list[str]] = [[] for _ in sizes]
    for name, parameter in own.items():
        for group, names in enumerate(found):
            at = starts[group] + len(names)
            if len(names) < sizes[group] and shapes[at] in (None, tuple(parameter.shape)):
                names.append(name)
                break
    return found if [len(names) for names in found] == list(sizes) else None


# -- rebuilding ------------------------------------------------------------------------------------


def rebuild_optimizer(
    module: torch.nn.Module,
    state: Mapping[Any, Any],
    made: Callable[..., torch.optim.Optimizer],
    known: str,
    *,
    simulated: bool = False,
) -> Rebuilt:
    """The optimizer, with its state loaded as torch loads it.

    Raises:
        Misfit: the state does not belong to these parameters.
        UsageError: the class can't be called with parameters. Any other exception comes from torch.
    """
    names = grouped_names(module, state)
    own = dict(module.named_parameters())
    keys = [key for group in state["param_groups"] for key in group["params"]]
    by_key = dict(zip(keys, chain.from_iterable(names), strict=True))
    content = _copied(state, plainly=simulated)
    groups = [
        {**_hyper_of(saved), "params": [own[name] for name in group]}
        for saved, group in zip(content["param_groups"], names, strict=True)
    ]
    optimizer = new(made, groups)
    problems = check(optimizer, state, by_key, own)
    if content["param_groups"] and any(not isinstance(key, int) for key in keys):
        content = _numbered(content)
    try:
        optimizer.load_state_dict(dict(content))
    except Exception as error:
        if problems:  # they say more than torch's error
            raise Misfit("; ".join(problems)) from error
        raise
    for n, group in enumerate(optimizer.param_groups):
        lacking = sorted(optimizer.defaults.keys() - group.keys())
        wanted = [key for key in lacking if key not in _MANNERS]  # torch fills in newer keys
        if wanted:
            problems.append(f"group {n} lacks {', '.join(wanted)}")
        group.update({key: optimizer.defaults[key] for key in lacking})
    saved = frozenset(key for key, slots in state["state"].items() if slots)
    name = f"{made.__name__} ({known})" if known else made.__name__
    return Rebuilt(optimizer, name, by_key, saved, problems)


def new(made: Callable[..., torch.optim.Optimizer], params: Any) -> torch.optim.Optimizer:
    """A new optimizer of a class, with default hyper-parameters; `lr` is given if it is required.

    Raises:
        UsageError: it needs more arguments, or is not an optimizer.
    """
    needs_lr = False
    try:
        rate = inspect.signature(made).parameters.get("lr")
        needs_lr = rate is not None and rate.default is inspect.Parameter.empty
    except (TypeError, ValueError):
        pass
    try:
        optimizer = made(params, lr=1e-3) if needs_lr else made(params)
    except TypeError as error:
        raise UsageError(
            f"{made.__name__} can't be created from parameters only: {error}"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"{made.__name__} does not make a torch.optim.Optimizer")
    return optimizer


def _hyper_of(group: Mapping[Any, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _copied(state: Mapping[Any, Any], *, plainly: bool) -> dict[str, Any]:
    """A copy of the state with its own groups; `plainly` selects the simple implementation.

    Fused and capturable kernels work only on real devices, and kernels for many tensors at once do
    not notice a tensor on the wrong device.
    """
    manner = {"foreach": False, "fused": None, "capturable": False}
    groups = []
    for group in state["param_groups"]:
        held = {key: value for key, value in group.items() if key != "param_names"}
        if plainly:
            held |= {key: value for key, value in manner.items() if key in held}
        groups.append(held)
    return {**state, "param_groups": groups}


def _numbered(state: Mapping[Any, Any]) -> dict[str, Any]:
    """The same state with numbers instead of the names with which FSDP and DCP save optimizers."""
    keys = [key for group in state["param_groups"] for key in group["params"]]
    number = {key: n for n, key in enumerate(keys)}
    return {
        **state,
        "state": {number[key]: slots for key, slots in state["state"].items() if key in number},
        "param_groups": [
            {**group, "params": [number[key] for key in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def check(
    optimizer: torch.optim.Optimizer,
    state: Mapping[Any, Any],
    names: Mapping[Any, str],
    own: Mapping[str, torch.nn.Parameter],
) -> list[str]:
    """The problems of the saved state, a line each."""
    problems: list[str] = []
    slots_of = {key: set(map(str, slots)) for key, slots in state["state"].items() if slots}
    usual: set[str] = set().union(*slots_of.values()) if slots_of else set()
    common = {
        key for key in usual if 2 * sum(key in each for each in slots_of.values()) > len(slots_of)
    }
    needed = _NEEDED.get(type(optimizer).__name__, set())
    foreign = type(optimizer).__name__ not in _NEEDED or "Adafactor" in type(optimizer).__name__
    for key, slots in state["state"].items():
        name = names.get(key)
        if name is None:
            problems.append(f"there is a state for parameter {key}, which is not in any group")
            continue
        if not isinstance(slots, Mapping) or not slots:
            continue
        lacking = needed - slots_of[key] | (set() if foreign else common - slots_of[key])
        if lacking:
            lacks = ", ".join(sorted(lacking))
            problems.append(f"the state of {name} (parameter {key}) lacks {lacks}")
        for slot, value in slots.items():
            if slot in SHAPED and isinstance(value, torch.Tensor):
                shape = own[name].shape
                if value.shape != shape:
                    problems.append(
                        f"{slot} of {name} (parameter {key}) is {list(value.shape)}, "
                        f"the parameter {list(shape)}"
                    )
                elif own[name].is_floating_point() and not value.is_floating_point():
                    kind = str(value.dtype).removeprefix("torch.")
                    problems.append(f"{slot} of {name} (parameter {key}) is of {kind}")
    return problems[:_MOST_LISTED]
