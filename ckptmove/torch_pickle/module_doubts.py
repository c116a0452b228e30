"""Find modules whose state dict cannot be known from the file.

Names follow `Module.state_dict`. Hooks may change what that gives, some modules pickle their state
in a form of their own, and the parameters of lazy modules may have no values yet. A class that
overrides `state_dict`, or has `get_extra_state`, leaves no trace in the file.
Source: torch/nn/modules/module.py (`_state_dict_hooks`); torch/nn/parameter.py
(`UninitializedParameter`); torch/ao/nn/quantized.
"""

from __future__ import annotations

from enum import Enum

from ..manifest.paths import spell
from ..pickles.nodes import Call, Global, Mapping, Node
from ..reports.display.phrases import few
from .pickled_modules import FRAME, is_module

_MOST = 1000  # places of a kind that are kept; a file may have any number
_LAZY = ("torch.nn.parameter.UninitializedParameter", "torch.nn.parameter.UninitializedBuffer")
_QUANTIZED = ("torch.ao.nn.quantized.", "torch.nn.quantized.", "torch.ao.nn.intrinsic.quantized.")
#: It only notes a version: torch/nn/utils/spectral_norm.py.
_HARMLESS = "torch.nn.utils.spectral_norm.SpectralNormStateDictHook"


class Doubt(Enum):
    """A reason why a state dict is unknown."""

    LAZY = "lazy modules have no values yet, and a state dict made of this file leaves them out: {}"
    HOOKED = "hooks may change the names in the state dict of {}"
    OWN = "modules that save their state in a form of their own have no names of a state dict: {}"


class Doubts:
    """The modules whose state dict is unknown."""

    def __init__(self) -> None:
        self._found: dict[Doubt, list[str]] = {}

    def note(self, doubt: Doubt, name: str) -> None:
        """Keep the name of such a place."""
        names = self._found.setdefault(doubt, [])
        if len(names) < _MOST:
            names.append("the whole model" if name == spell(()) else name)

    def sentences(self) -> list[str]:
        """What to say about them."""
        return [doubt.value.format(few(names)) for doubt, names in self._found.items()]


def doubt_within(node: Node, frame: str | None) -> Doubt | None:
    """The reason why the state dict of a module is unknown because of this node, if it is.

    `frame`: which of `FRAME` holds the node right within a module; None for anything else.
    """
    if not isinstance(node, Call):
        return None
    if frame == FRAME[2] and not is_module(node):
        return Doubt.OWN
    return Doubt.LAZY if frame in FRAME[:2] and node.qualname in _LAZY else None


def is_packed(module: Call) -> bool:
    """Whether a module is quantized, and packs its weights into an object of torch's."""
    return (module.qualname or "").startswith(_QUANTIZED)


def is_hooked(attributes: Mapping) -> bool:
    """Whether hooks change the state dict of a module with these attributes."""
    for key in ("_state_dict_hooks", "_state_dict_pre_hooks"):
        hooks = attributes.get(key)
        for _, hook in hooks.pairs if isinstance(hooks, Mapping) else []:
            if isinstance(hook, (Call, Global)) and hook.qualname != _HARMLESS:
                return True
    return False
