"""Find lines that cut values from the graph of autograd on their way to another device.

The parameters behind such a value get no gradient, so they are not trained.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ....reports.events import Site
from ..program.syntax import code_at

_MOST_SEARCHES = 256
_MOST_NODES = 4096  # the most nodes of a graph of autograd that are searched
#: Code that brings a tensor to another device.
_MOVES = re.compile(r"\.(to|cuda|cpu|numpy|copy_)\(")


class Cut(NamedTuple):
    """A line that cuts a value from the graph, and the parameters from which it was computed."""

    line: str
    parameters: Sequence[weakref.ref[torch.Tensor]]


class GradientCuts:
    """The cuts between the graph and parameters that have no gradient after a step.

    Attributes:
        is_watching: whether there are such parameters.
        found: the cuts, by line.
    """

    def __init__(self, is_fed: Callable[[torch.Tensor], bool]) -> None:
        """`is_fed` tells whether a parameter has a gradient, or had one."""
        self._is_fed = is_fed
        self._missed: dict[int, weakref.ref[torch.Tensor]] = {}  # by id
        self._searches = 0
        self.is_watching = False
        self.found: dict[str, Cut] = {}

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """After a step, find the parameters of the optimizer that had no gradient so far."""
        for each in (p for group in optimizer.param_groups for p in group["params"]):
            if each.grad is not None:
                self._missed.pop(id(each), None)
            elif each.requires_grad and each.is_leaf and not self._is_fed(each):
                self._missed[id(each)] = weakref.ref(each)
        self.is_watching = bool(self._missed)

    def look(self, op: str, taken: Sequence[torch.Tensor], site: Site) -> None:
        """Record a cut if an operation takes tensors and cuts one of them from the graph."""
        if not op.startswith("aten.detach") and torch.is_grad_enabled():
            return
        for each in taken:
            if each.grad_fn is None or self._searches >= _MOST_SEARCHES or not site.source:
                continue
            self._searches += 1
            those = [ref for ref in map(self._missed.get, _leaves(each.grad_fn)) if ref is not None]
            if those and _MOVES.search(code_at(site.source)):
                self.found.setdefault(site.source, Cut(site.source, those))

    def cuts(self, models: Iterable[nn.Module]) -> list[tuple[str, list[str]]]:
        """Each line that cuts, with the names of parameters that still have no gradient."""
        named = {id(p): name for model in models for name, p in model.named_parameters()}
        found = []
        for line, cut in self.found.items():
            alive = [each for ref in cut.parameters if (each := ref()) is not None]
            missed = [each for each in alive if not self._is_fed(each)]
            names = [named.get(id(each), "a parameter") for each in missed]
            if names:
                found.append((line, list(dict.fromkeys(names))))
        return found


def _leaves(node: Any) -> list[int]:
    """The ids of the leaf tensors from which a node of autograd was computed."""
    todo, met, found = [node], {node}, []
    while todo and len(met) < _MOST_NODES:
        each = todo.pop()
        variable = getattr(each, "variable", None)
        if variable is not None:
            found.append(id(variable))
        for before, _ in each.next_functions:
            if before is not None and before not in met:
                met.add(before)
                todo.append(before)
    return found
