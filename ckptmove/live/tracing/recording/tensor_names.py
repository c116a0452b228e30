"""Name a tensor as the user does: an attribute of the model, an argument, or a line of code."""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from ....reports.events import Operand, Site
from ...inventory.holdings import COMPILED, Ownership, holdings, original_model
from ..program.source_lines import (
    LAYER,
    fields_of,
    is_a,
    is_function,
    is_outer,
    is_within,
    items_of,
    locals_of,
    model_name,
    modules_in,
    move_of,
    user_frame,
    variable,
)
from ..program.syntax import arguments_of_call, function_at, is_place
from .call_arguments import arguments_of, names_of
from .history import History
from .operations import COPY, LOAD, UNNAMED, factory
from .remembered import StorageNotes, key_of, shape_of
from .stepping import SteppingOptimizers, code_that_makes

_MOST_SOURCES = 16  # the most tensors in a chain of computations
_MOST_CALLERS = 8  # the most callers whose variables are searched for a tensor's source
_MOST_WALKS = 32  # the most searches of the models for a name
#: How a tensor is held: made outside of a model; or computed from such a tensor, like a batch.
_OUTSIDE, _GIVEN = "outside", "given"
#: Shown for a parameter of an unknown module.
PARAMETER = "a parameter"
#: How an operand is held that a model on another device returned.
OUTPUT = "output"
#: How a tensor is held that is trained, and belongs to no known module.
TRAINED = "trained"
_COPIED = f"what {COPY} "
_LOOSE = ("", "made", _OUTSIDE, _GIVEN)
#: How the tensors of a model are held that a call of `.to` may leave elsewhere, or come later.
_OF_MODELS = (Ownership.UNREGISTERED, Ownership.HOOK, Ownership.BUFFER)


class _Name(NamedTuple):
    name: str
    held: str
    module: str
    owner: str = ""
    source: str = ""  # the code that made the owner, with its lines


class TensorNames:
    """The names of tensors."""

    def __init__(self, history: History) -> None:
        """`history` tells where modules were made."""
        self._history = history
        self._models: list[weakref.ref[nn.Module]] = []
        self.optimizers = SteppingOptimizers(history)  #: optimizers that took a step
        self._modules: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._variables: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._called: dict[int, weakref.ref[nn.Module]] = {}
        self._held = StorageNotes(most=None)
        self._walks = 0
        self._inputs = StorageNotes()
        self._made = StorageNotes()
        self._derived = StorageNotes()
        self._sources = StorageNotes()  # the key of the tensor that another was computed from
        self._parents = StorageNotes()  # the same, also inside a model
        self._origins = StorageNotes()  # the site that computed a tensor
        self._clones = StorageNotes()  # the lines that cloned a parameter
        self._outputs = StorageNotes()  # the model on another device that returned a tensor

    @property
    def models(self) -> list[nn.Module]:
        """The known models that still exist."""
        return [each for ref in self._models if (each := ref()) is not None]

    @property
    def latest(self) -> list[nn.Module]:
        """Models with parameters or buffers that were called; the last called is the last one."""
        return [each for ref in self._called.values() if (each := ref()) is not None]

    def know(self, model: nn.Module) -> None:
        """Remember a model and the dotted names of its modules."""
        if model not in self._modules:
            self._models.append(weakref.ref(model))
            if self._walks < 2 * _MOST_WALKS and any(m in self._modules for m in model.modules()):
                self._walk()  # it names the tensors of a known one
            for path, module in model.named_modules():
                keys = [key for key in path.split(".") if key != COMPILED]
                self._modules.setdefault(module, ".".join(keys))

    def of_module(self, module: nn.Module) -> str:
        """The dotted name of a module; the name of its class if it is not known."""
        found = self._modules.get(module)
        return type(original_model(module)).__name__ if found is None else found

    def variable(self, model: nn.Module) -> str:
        """The variable of a model in the code that called it; "" if there is none."""
        return self._variables.get(model, "")

    def called(
        self,
        model: nn.Module,
        args: Any,
        kwargs: Any,
        spelled: Callable[[str, torch.Tensor], str],
        frame: FrameType | None = None,
    ) -> list[torch.Tensor]:
        """Remember the arguments of a model call; returns the tensors in them.

        `spelled` returns the caller's name of an argument; `frame` is the caller's frame.
        """
        found = []
        if frame is not None and not self._variables.get(model):
            name = model_name(frame, model)
            self._variables[model] = "" if name == "self" else name
        if next(itertools.chain(model.parameters(), model.buffers()), None) is not None:
            self._called.pop(id(model), None)
            self._called[id(model)] = weakref.ref(model)
        for name, tensor in arguments_of(model, args, kwargs):
            made: Site | None = self._made.about(tensor)
            own = isinstance(tensor, nn.Parameter)  # of any module
            if not own and (made is None or not made.phase or made.op == COPY):
                self._inputs.note(tensor, spelled(name, tensor))
            found.append(tensor)
        return found

    def argument_name(
        self, argument: str, tensor: torch.Tensor, model: nn.Module, frame: FrameType
    ) -> str:
        """The name of a model's argument in the frame that calls the model.

        The name follows the call: for `net(batch)` it is `batch.x`, even if a variable `x` also
        holds the tensor.
        """
        known = variable(frame, tensor) or self.kept(frame, tensor)
        given, named = arguments_of_call(frame, self.variable(model) or model_name(frame, model))
        used = set(re.findall(r"[^\W\d]\w*", " ".join([*given, *named.values()])))
        if known and (not used or re.split(r"[.\[]", known, maxsplit=1)[0] in used):
            return known
        names, (argument, dot, rest) = names_of(model), argument.partition(".")
        at = names.index(argument) if argument in names else len(given)
        code = given[at] if at < len(given) else named.get(argument, argument)
        holder = locals_of(frame).get(code, frame.f_globals.get(code))
        held = fields_of(holder) if dot else {}
        if known and not held:
            return known  # what is in a list, or in what another call gives
        beside = [each for each in held.values() if is_a(each, torch.Tensor)]
        method = move_of(holder)
        if method and any(each.device != tensor.device for each in beside):
            self._history.note_left_by(tensor, method)
        code = code if is_place(code) else argument
        return f"{code}{dot}{rest}"

    def kept(self, frame: FrameType | None, tensor: torch.Tensor) -> str:
        """The variable of a frame or its callers that holds a tensor or its source; or "".

        If the frame runs a function, variables at module level are ignored: they hold no batch.
        """
        keys = self._chain(tensor)
        within = frame is not None and is_function(frame)
        for _ in range(_MOST_CALLERS):
            if frame is None or not keys or (within and not is_function(frame)):
                return ""
            name, _tensor = kept_in(frame, keys) or ("", None)
            if name:
                return name
            frame = user_frame(frame.f_back)
        return ""

    def made(self, tensor: torch.Tensor, site: Site) -> None:
        """Remember where a tensor was made."""
        self._made.note(tensor, site)

    def gave(self, model: nn.Module, tensors: Sequence[torch.Tensor], line: str) -> None:
        """Remember that a model returned tensors, and the line that called it."""
        kind = type(original_model(model)).__name__
        for each in tensors:
            self._outputs.note(each, (self.variable(model) or kind, kind, line))

    def derived(self, tensors: Sequence[torch.Tensor], source: torch.Tensor, site: Site) -> None:
        """Give tensors that were computed at a site the name of their operand `source`."""
        found = self._of(source, walk=False)
        if found.held == _OUTSIDE:
            found = found._replace(held=_GIVEN)
        for each in tensors:
            if key_of(each) == key_of(source):
                continue
            if found.held:
                self._derived.note(each, found)
            self._origins.note(each, site)
            self._parents.note(each, key_of(source))
            if found.held in _LOOSE and not site.phase:  # else a model's output would be its input
                self._sources.note(each, key_of(source))

    def cloned(self, tensor: torch.Tensor, lines: str) -> None:
        """Remember a clone of a parameter, such as an average of it, and the lines that made it."""
        if lines:
            self._clones.note(tensor, lines)

    def origin(self, tensor: torch.Tensor) -> str:
        """The code that made a tensor, if it was recorded: `torch.ones at train.py:3`; else ""."""
        for key in reversed(self._chain(tensor)):
            for notes in (self._made, self._origins):
                if key in notes:
                    return _spell(notes[key][1])
        return ""

    def argument(self, key: int | None) -> str | None:
        """The name of the argument whose storage has this key, or None."""
        found = None if key is None else self._inputs.get(key)
        return None if found is None else str(found[1])

    def operand(
        self, tensor: torch.Tensor, device: str, frame: FrameType | None = None, code: str = ""
    ) -> Operand:
        """Describe a tensor; the frame of the code that uses it may have a variable for it.

        `code` is the expression whose value it is.
        """
        found = self._operand(tensor, device, frame, code)
        return found if found.source else found._replace(source=self._history.left(tensor))

    def _operand(
        self, tensor: torch.Tensor, device: str, frame: FrameType | None, code: str
    ) -> Operand:
        found = self._of(tensor)
        name, held, other = found.name, found.held, ""
        chain = self._chain(tensor, self._parents) if held in (*_LOOSE, "input") else ()
        given = next((self._outputs[key][1] for key in chain if key in self._outputs), None)
        if given is not None:
            owner, kind, line = given
            other = "" if frame is None else variable(frame, tensor)
            name = other or (name if held == "input" else "what it gives")
            name = name.partition(", made by ")[0]
            return Operand(name, device, shape_of(tensor), OUTPUT, kind, other, owner, line)
        anew = held == "made" and name.startswith(f"what {LAYER}")  # with its layer, in `forward`
        if frame is not None and not anew and (held in _LOOSE or held == "input"):
            of_other = self._of_other(tensor, frame)  # of a model never called: averages, say
            if of_other is not None:
                inner, owner, held, line = of_other
                return Operand(inner, device, shape_of(tensor), held, "", "", owner, line)
        if held in _LOOSE:
            other = "" if frame is None else variable(frame, tensor)
            if held == _OUTSIDE and frame is not None and _is_of_module(frame, other):
                name, module = other.removeprefix("self."), type(frame.f_locals["self"]).__name__
                held = str(Ownership.UNREGISTERED)
                return Operand(name, device, shape_of(tensor), held, "", "", module)
            learned = None if frame is None else self._learned(tensor, frame)
            if learned is not None:
                origin = _spell(self._made.about(learned[1]) or self._origins.about(learned[1]))
                name = f"what {origin.replace(' at ', ' makes at ', 1)}" if origin else learned[0]
                return Operand(name, device, shape_of(tensor), TRAINED, "", learned[0])
            if (
                held == _OUTSIDE
                and not other
                and frame is not None
                and not self.kept(frame, tensor)
            ):
                held = "made"  # no variable holds it
            if held == _OUTSIDE:  # made where it is used, or once; else a batch
                line = name.rpartition(" at ")[2]
                here = frame is not None and (is_within(frame, line) or is_outer(frame, other))
                held = "made" if here else ""
                if other and not held:
                    other = f"{other}, made by {name.removeprefix('what ').replace(' makes', '')}"
            held = "" if held == _GIVEN else held
            if isinstance(tensor, nn.Parameter) and not held:  # of no known module
                held = "made" if found.held == _OUTSIDE else str(Ownership.PARAMETER)
            of_model = None if held else self._of_model(tensor)
            if of_model is not None:
                return Operand(of_model.name, device, shape_of(tensor), *of_model[1:3], other)
            name = name if held else other or name
            if not held:
                held, name, other = self._as_state(tensor, frame, name, other, code)
        if held == "made" and isinstance(tensor, nn.Parameter):
            other = other or PARAMETER
        if held == "made" and not other and frame is not None:
            other, _ = kept_in(frame, self._chain(tensor, self._parents)) or ("", None)
            other = other or (code if "(" not in code else "")
        other = other.partition(", made by ")[0]
        kept = shape_of(tensor), held, found.module, other, found.owner, found.source
        return Operand(name, device, *kept)

    def _learned(self, tensor: torch.Tensor, frame: FrameType) -> tuple[str, torch.Tensor] | None:
        """The variable and the trained leaf tensor from which a tensor is computed; or None."""
        for around in (frame, user_frame(frame.f_back)):
            for key in reversed(self._chain(tensor, self._parents)):
                found = None if around is None else kept_in(around, [key])
                if found is not None and found[1].requires_grad and found[1].is_leaf:
                    return found
        return None

    def _of_model(self, tensor: torch.Tensor) -> _Name | None:
        """The tensor of a model from which a tensor elsewhere was computed, or None."""
        keys = self._chain(tensor, self._parents)
        found = [self._held[key][1] for key in keys if key in self._held]
        return next((each for each in found if each.held in _OF_MODELS), None)

    def _as_state(
        self, tensor: torch.Tensor, frame: FrameType | None, name: str, other: str, code: str
    ) -> tuple[str, str, str]:
        """How a tensor without a name is held, its name, and the variable that keeps it."""
        lines: str | None = self._clones.about(tensor)
        if lines is not None:
            return "made", f"what torch.clone makes at {lines}", other or code
        holder, kept = (other, tensor)
        if frame is not None and not other:
            holder, kept = kept_in(frame, self._chain(tensor)) or ("", tensor)
            holder = holder or self.kept(user_frame(frame.f_back), tensor)
        if holder.startswith("self."):
            origin = _spell(self._origins.about(kept) or self._made.about(kept))
            maker, _, line = origin.partition(" at ")
            if origin:
                return "made", f"what {maker} makes at {line}", holder
        if not holder and code:
            origin = _spell(self._origins.about(tensor) or self._made.about(tensor))
            maker, _, line = origin.partition(" at ")
            if line and code.partition("(")[0].rpartition(".")[2] == function_at(line):
                return "made", f"what {maker} makes at {line}", code
            holder = code
        origin = "" if not holder or ", made by " in holder else self.origin(tensor)
        return "", f"{holder}, made by {origin}" if origin else holder or name, holder

    def _chain(self, tensor: torch.Tensor, sources: StorageNotes | None = None) -> list[int]:
        """The keys of a tensor, and of the tensors from which it was computed in turn."""
        sources = self._sources if sources is None else sources
        keys: list[int] = []
        key = key_of(tensor)
        while key is not None and len(keys) < _MOST_SOURCES:
            keys.append(key)
            key = sources[key][1] if key in sources else None
        return keys

    def _of(self, tensor: torch.Tensor, *, walk: bool = True) -> _Name:
        """The name of a tensor: from the model, else its caller, else what made it."""
        found: _Name | None = self._held.about(tensor)
        given = self._inputs.about(tensor)
        if found is None and given is None and walk and self._walks < _MOST_WALKS:
            self._walk()
            found = self._held.about(tensor)
        if found is not None:
            return found
        made: Site | None = self._made.about(tensor)
        derived: _Name | None = self._derived.about(tensor)
        if given is not None:
            origin = self.origin(tensor)
            if not origin and derived is not None and derived.name.startswith(_COPIED):
                origin = derived.name.removeprefix("what ").replace(" makes", "", 1)
            return _Name(given + (f", made by {origin}" if origin else ""), "input", "")
        if derived is not None:
            return derived
        if made is not None:
            held = "made" if made.phase else _OUTSIDE
            name = f"what {_maker(made.op)} makes at {made.source}"
            return _Name(name, held, made.module, made.phase)
        sizes = ", ".join(map(str, shape_of(tensor)))
        return _Name(f"a {str(tensor.dtype).removeprefix('torch.')} tensor [{sizes}]", "", "")

    def _of_other(self, tensor: torch.Tensor, frame: FrameType) -> tuple[str, str, str, str] | None:
        """Find a tensor among the parameters and buffers of other modules that the code has.

        Returns its name, its owner, how it is held, and the code that made the owner; or None.
        """
        found: dict[int | None, tuple[str, str, str, nn.Module, FrameType]] = {}
        for owner, module, around in modules_in(frame):
            for name, each in module.named_buffers():
                held = str(Ownership.BUFFER)
                found.setdefault(key_of(each), (name, owner, held, module, around))
            for name, each in module.named_parameters():
                if not isinstance(each, nn.Parameter):
                    continue  # torch.func put it there for this call
                held = str(Ownership.PARAMETER)
                found.setdefault(key_of(each), (name, owner, held, module, around))
        for key in self._chain(tensor):
            if key in found:
                name, owner, held, module, around = found[key]
                anew = held == str(Ownership.BUFFER) and key in self._made
                if anew and all(p.device != tensor.device for p in module.parameters()):
                    return None  # a method of a module that was moved made it
                line = self._history.told_of(module) or code_that_makes(around, owner)
                return name, owner, held, line
        return None

    def _walk(self) -> None:
        """Search the models for tensors again, because attributes may have changed."""
        self._walks += bool(self.models)
        self._held.clear()
        for model in sorted(self.models, key=lambda each: -len([*each.modules()])):  # outer first
            found = holdings(model, self.optimizers.known, as_written=True).all
            owner = self.variable(model) or type(original_model(model)).__name__
            made = self._history.told_of(model)
            for each in sorted(found, key=lambda each: each.held is Ownership.FOREIGN):
                if each.held is Ownership.PARAMETER and not isinstance(each.tensor, nn.Parameter):
                    continue  # torch.func put it there for this call
                name = _Name(each.name, str(each.held), each.module, owner, made)
                self._held.note(each.tensor, name)


def kept_in(frame: FrameType, keys: Sequence[int]) -> tuple[str, torch.Tensor] | None:
    """The name of a frame's variable or `self` attribute with one of these keys, and its tensor."""
    held = {name: each for name, each in locals_of(frame).items() if not name.startswith("_")}
    own = fields_of(held.pop("self", None))
    named = [*held.items(), *((f"self.{name}", each) for name, each in own.items())]
    for name, value in named:
        for key, each in (("", value), *items_of(value)):
            if is_a(each, torch.Tensor) and key_of(each) in keys:
                registered = name in ("self._buffers", "self._parameters")
                return f"self.{key[2:-2]}" if registered else f"{name}{key}", each
    return None


def _is_of_module(frame: FrameType, name: str) -> bool:
    """Whether a frame's variable is an attribute of the module whose method it runs."""
    of = locals_of(frame).get("self")
    attribute = name.removeprefix("self.")
    return is_a(of, nn.Module) and attribute != name and attribute in vars(of)


def _spell(made: Site | None) -> str:
    """The code that made a tensor: `torch.ones at train.py:3`; "" if it is not known."""
    return "" if made is None or not made.source else f"{_maker(made.op)} at {made.source}"


def _maker(op: str) -> str:
    return op if op in (COPY, LOAD) or op.startswith(LAYER) else factory(op) or UNNAMED
