"""Take one step of a model: forward; for training also loss, backward and optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from ..display.phrases import class_name, join_names, plural
from ..live.inventory.holdings import Ownership, holdings
from ..live.inventory.ownership import misplaced_tensors as apart_from_parameters
from ..live.tracing.recording.operations import indexed
from ..live.tracing.recording.recorder import Recorder
from .model.inputs import SEED, CallArguments
from .state.optimizer_state import Rebuilt
from .state.state_dict_fit import bits_equal

_MOST_LISTED = 8
#: Relative and absolute tolerance where bits may differ, by the coarsest dtype.
_TOLERANCES = {
    torch.float64: 1e-7,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
_COARSEST = 0.1


@dataclass
class Step:
    """The result of a step."""

    #: How the loss was made; None without training.
    loss: str | None = None
    value: float | None = None
    #: Tensors of the output on the CPU, by name. This and `parameters` are empty without values.
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    #: Parameters and buffers after the step.
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    #: The number of parameters that have a gradient.
    gradients: int = 0
    problems: list[str] = field(default_factory=list)


class NoLoss(Exception):
    """No tensor of the output is differentiable."""


def take_step(
    module: torch.nn.Module,
    batch: CallArguments,
    optimizer: Rebuilt | None,
    recorder: Recorder,
    *,
    values: bool,
    keep: bool,
) -> Step:
    """Take a step; without an optimizer, only the forward pass.

    Raises:
        NoLoss: there is nothing to train. Any other exception comes from the model or torch.
    """
    step = Step()
    set_mode(module, train=optimizer is not None)
    torch.manual_seed(SEED)
    with recorder:
        output = _forward(module, batch, train=optimizer is not None)
        if optimizer is not None:
            loss, step.loss = _loss(output, batch)
            loss.backward()
            _update(module, batch, optimizer.optimizer)
    if optimizer is not None and values:
        step.value = float(loss.detach())
    leaves = dict(tensors_of(output))
    if not leaves:
        step.problems.append(f"the output holds no tensor to look at: {class_name(output)}")
    if values:
        step.problems += _not_finite({_output(n): leaf for n, leaf in leaves.items()})
        own = dict(module.named_parameters())
        gradients = {n: p.grad for n, p in own.items() if p.grad is not None}
        told = {f"the gradient of {n}": gradient for n, gradient in gradients.items()}
        step.problems += _not_finite(told) + _no_numbers(module)
        if optimizer is not None and not step.problems:
            updated = {f"after the step, {n}": own[n] for n in gradients}
            step.problems += _not_finite(updated)
    step.gradients = sum(p.grad is not None for p in module.parameters())
    if optimizer is not None:
        step.problems += _unsaved(module, optimizer)
    if keep and values:
        step.outputs = {name: _kept(leaf) for name, leaf in leaves.items()}
        step.parameters = {name: _kept(each) for name, each in _named(module)}
    return step


def _forward(module: torch.nn.Module, batch: CallArguments, *, train: bool) -> Any:
    with torch.set_grad_enabled(train):
        return module(*batch.args, **batch.kwargs)


def _update(
    module: torch.nn.Module, batch: CallArguments, optimizer: torch.optim.Optimizer
) -> None:
    def again() -> torch.Tensor:
        optimizer.zero_grad()
        loss, _ = _loss(_forward(module, batch, train=True), batch)
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(again)
    else:
        optimizer.step()


def set_mode(module: torch.nn.Module, *, train: bool) -> None:
    """Set training or inference mode; programs of torch.export keep the mode of their trace."""
    try:
        module.train(train)
    except NotImplementedError:
        return


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


# -- outputs and the loss --------------------------------------------------------------------------


def tensors_of(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a model's output, each with a name; "" if it is the only one."""
    todo: list[tuple[str, Any]] = [("", output)]
    met: set[int] = set()
    while todo:
        name, value = todo.pop()
        if isinstance(value, torch.Tensor):
            yield name, value
            continue
        if id(value) in met:
            continue
        met.add(id(value))
        parts: list[tuple[Any, Any]] = []
        if isinstance(value, Mapping):
            parts = list(value.items())
        elif isinstance(value, (list, tuple)):
            keys = getattr(value, "_fields", range(len(value)))
            parts = list(zip(keys, value, strict=False))
        elif is_dataclass(value):
            parts = [(each.name, getattr(value, each.name)) for each in fields(value)]
        todo += [(f"{name}.{key}" if name else str(key), part) for key, part in reversed(parts)]


def _loss(output: Any, batch: CallArguments) -> tuple[torch.Tensor, str]:
    """The loss to minimize, and how it is made."""
    leaves = dict(tensors_of(output))
    own = leaves.get("loss")
    if own is not None and own.dim() == 0 and own.requires_grad:
        return own, "the model's own loss"
    differentiable = [
        leaf for leaf in leaves.values() if leaf.is_floating_point() and leaf.requires_grad
    ]
    if not differentiable:
        raise NoLoss("no output of the model is differentiable")
    if len(leaves) == 1 and differentiable[0].dim() == 0:
        return differentiable[0], "the output of the model, which is one number"
    squares = [leaf.square().mean() for leaf in differentiable]
    return sum(squares[1:], start=squares[0]), "the mean of the squared outputs"


def _output(name: str) -> str:
    return f"the output {name}" if name else "the output"


def _not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    lines = []
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or not (
            tensor.is_floating_point() or tensor.is_complex()
        ):
            continue
        wrong = int((~torch.isfinite(tensor.detach())).sum())
        if wrong:
            lines.append(f"{name} is not finite in {wrong:,} of {tensor.numel():,} values")
    return lines[:_MOST_LISTED]


def _no_numbers(module: torch.nn.Module) -> list[str]:
    """Lines for buffers with NaNs, which not every step uses. Infinities are valid in masks."""
    lines = []
    for name, buffer in module.named_buffers():
        if buffer.layout is torch.strided and buffer.is_floating_point():
            wrong = int(buffer.detach().isnan().sum())
            if wrong:
                lines.append(f"{name} is NaN in {wrong:,} of {buffer.numel():,} values")
    return lines[:_MOST_LISTED]


def _unsaved(module: torch.nn.Module, rebuilt: Rebuilt) -> list[str]:
    """A line about trained parameters without a saved state, if other parameters have one."""
    # LBFGS keeps a single state for all parameters.
    if not rebuilt.saved or isinstance(rebuilt.optimizer, torch.optim.LBFGS):
        return []
    own = dict(module.named_parameters())
    without = [
        f"{name} (parameter {key})"
        for key, name in rebuilt.names.items()
        if key not in rebuilt.saved and name in own and own[name].grad is not None
    ]
    # An optimizer saves no state for a parameter if the only value of that state is None.
    if not without or len(without) == len(rebuilt.names):
        return []
    return [f"no state is saved for {join_names(without)}, which the step updates"]


# -- devices ---------------------------------------------------------------------------------------


def misplaced_tensors(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device
) -> list[tuple[str, str, str]]:
    """The tensors on a wrong device: name, its device, and the right device."""
    found = holdings(module, optimizer)
    home = indexed(device)
    strays = [
        (each.name, str(each.tensor.device), str(device))
        for each in found.of(Ownership.PARAMETER, Ownership.BUFFER, Ownership.TRANSIENT)
        if indexed(each.tensor.device) != home
    ]
    wrong = apart_from_parameters(found)
    return [*strays, *((each.name, each.device, each.wanted) for each in wrong)]


def misplaced_lines(found: Sequence[tuple[str, str, str]], call: Callable[[str], str]) -> list[str]:
    """A line about misplaced tensors for each pair of devices."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, here, there in found:
        groups.setdefault((call(here), call(there)), []).append(name)
    return [
        f"on {here}, not on {there}: {join_names(names)}" for (here, there), names in groups.items()
    ]


# -- two steps -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepComparison:
    """How far the results of two steps agree."""

    equal: bool
    close: bool
    lines: Sequence[str]
    tolerance: float


def compare_steps(one: Step, other: Step, dtypes: Collection[torch.dtype] = ()) -> StepComparison:
    """Compare the results of two steps; the coarsest dtype in `dtypes` sets the least tolerance."""
    lines: list[str] = []
    equal = close = True
    worst = max((_tolerance(each) for each in dtypes), default=0.0)
    pairs = [("output", one.outputs, other.outputs), ("after", one.parameters, other.parameters)]
    for what, here, there in pairs:
        lacking = sorted(set(here) ^ set(there))
        if lacking:
            equal = close = False
            lines.append(f"only one of them has {join_names(lacking)}")
        for name in sorted(set(here) & set(there)):
            a, b = here[name], there[name]
            label = _output(name) if what == "output" else f"{name} after the step"
            if a.shape != b.shape:
                equal = close = False
                lines.append(f"{label} is {list(a.shape)} and {list(b.shape)}")
                continue
            if a.dtype == b.dtype and bits_equal(a, b):
                continue
            equal = False
            tolerance = max(_tolerance(a.dtype), _tolerance(b.dtype), worst)
            worst = max(worst, tolerance)
            wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
            apart = (a.to(wide) - b.to(wide)).abs()
            near = torch.allclose(a.to(wide), b.to(wide), tolerance, tolerance, equal_nan=True)
            close = close and near
            largest = float(apart.max()) if apart.numel() else 0.0
            n = int((apart != 0).sum())
            lines.append(f"{label} differs in {plural(n, 'value')}, by at most {largest:.3g}")
    more = len(lines) - _MOST_LISTED
    lines = lines[:_MOST_LISTED] + ([f"and {more:,} more"] if more > 0 else [])
    return StepComparison(equal, close, lines, worst)


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCES.get(dtype, _COARSEST if dtype.is_floating_point else 0.0)
