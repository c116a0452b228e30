"""Remember where a program made and moved the objects that a finding may be about.

A module, a generator or a device stays the same object wherever the program passes it. So the line
that made it is known, whatever its variable is called. Objects that were made before the recording
began have no line.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Container, Iterator, Mapping
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ..program.source_lines import CALLED, is_a, is_library, line_of, locals_of, own_frame, variable
from ..program.syntax import code_at
from .remembered import StorageNotes, key_of

#: Follows the name of a method that should move a tensor.
DOES_NOT_MOVE = ", does not move it"
_MOVES = re.compile(r"\.(to|cuda)\(")
_MOST_FRAMES = 64  # the most frames that are searched for the user's own code
_MOST_LINES = 3  # the most lines of the user's code, from the innermost outwards
_MOST_KEPT = 4096  # the most devices, generators, loaders and lines of each kind


class ModuleMove(NamedTuple):
    """A call of `.to`, `.cuda` or `.cpu` on a module, or on a module that contains it."""

    number: int  #: of the event; later events have larger numbers
    line: str  #: the line of the call
    device: str  #: the device of the module after the call
    chosen: str  #: the line that made the given device, or ""
    before: str = ""  #: the device after the previous such call, or ""


class StateLoad(NamedTuple):
    """A call of an optimizer's `load_state_dict`."""

    line: str
    device: str  #: the device of its parameters at that time


class CopiedWeight(NamedTuple):
    """A trained tensor that was copied to another device."""

    name: str  #: the variable of the tensor, or ""
    line: str  #: the line of the first copy
    again: bool  #: whether it was also copied after an optimizer step


class Loader(NamedTuple):
    """A DataLoader that the program made."""

    line: str
    pins: bool  #: whether it has `pin_memory=True`
    shuffles: bool  #: whether it shuffles without a generator
    forks: bool  #: whether it has workers


_V = TypeVar("_V")


class _ByIdentity(Generic[_V]):
    """Notes about objects, found by identity: some objects have no hash before they are complete.

    The notes do not keep the objects alive.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Any], _V]] = {}

    def set(self, of: object, note: _V) -> None:
        """Set the note about an object."""
        key, kept = id(of), self._kept
        self._kept[key] = weakref.ref(of, lambda _: kept.pop(key, None)), note

    def get(self, of: object) -> _V | None:
        """The note about an object, or None."""
        found = self._kept.get(id(of))
        return None if found is None or found[0]() is not of else found[1]

    def items(self) -> Iterator[tuple[Any, _V]]:
        """The objects that still exist, each with its note."""
        for ref, note in list(self._kept.values()):
            of = ref()
            if of is not None:
                yield of, note


class History:
    """The objects that the program made, filled and moved, and the lines that did it."""

    def __init__(self) -> None:
        self._number = 0
        self._made: _ByIdentity[tuple[int, str]] = _ByIdentity()  # modules and optimizers
        self._moved: _ByIdentity[ModuleMove] = _ByIdentity()
        self._moves: dict[type, str] = {}  # the latest line that moved a module of a class
        self._filled: _ByIdentity[tuple[int, str]] = _ByIdentity()
        self._states: _ByIdentity[StateLoad] = _ByIdentity()  # of optimizers
        self._devices: dict[int, tuple[object, str]] = {}
        #: Lines where a device could not be made, or a move failed → the class of the exception.
        self.refused: dict[str, str] = {}
        self._generators: dict[str, torch.Generator] = {}  # by line
        self.loaders: list[Loader] = []
        self._copied: _ByIdentity[CopiedWeight] = _ByIdentity()
        self._values: _ByIdentity[str] = _ByIdentity()  # the lines that set the `.data` of tensors
        self.autocasts: dict[str, str] = {}  #: lines that enter autocast → its kind of device
        #: For each parameter, the modules that registered it, each with the parameter's name there.
        self._registered: _ByIdentity[list[tuple[weakref.ref[torch.nn.Module], str]]]
        self._registered = _ByIdentity()
        # For each module, its parameters that were registered after it was moved, with the lines.
        self._replaced: _ByIdentity[dict[str, tuple[int, str]]] = _ByIdentity()
        self._untied: dict[str, list[tuple[weakref.ref[torch.nn.Module], str]]] = {}  # by line
        #: How often a module was moved away and back: by the lines of both moves.
        self.swings: dict[tuple[str, str], int] = {}
        #: How often a line made an optimizer of parameters for which another one has a state.
        self.replaced: dict[str, int] = {}
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._storages = (
            StorageNotes()
        )  # the first parameter that had a storage: its module and name
        self._left_by = StorageNotes()  # the method of a tensor's owner that should move it
        self._left = StorageNotes()  # the line of a `.to` that did not move a tensor

    # -- events ------------------------------------------------------------------------------------

    def note_made(self, made: object, frame: FrameType | None) -> None:
        """Record that a frame makes a module or an optimizer."""
        if self._made.get(made) is None:
            lines = own_lines(frame, made=made)
            self._made.set(made, (self._next(), lines))
            if is_a(made, torch.optim.Optimizer):
                self._note_optimizer(made, lines)

    def _note_optimizer(self, made: torch.optim.Optimizer, lines: str) -> None:
        """Record an optimizer; it may replace one that has a state for the same parameters."""
        own = {id(each) for group in made.param_groups for each in group["params"]}
        known = [each for ref in self._optimizers if (each := ref()) is not None]
        if any(own & {id(p) for p in each.state} for each in known if each is not made):
            self.replaced[lines] = self.replaced.get(lines, 0) + 1
        if len(self._optimizers) < _MOST_KEPT and all(each is not made for each in known):
            self._optimizers.append(weakref.ref(made))

    def note_moved(self, module: torch.nn.Module, to: object, frame: FrameType | None) -> None:
        """Record that a module was moved; `to` is the given device."""
        first = next(module.parameters(), None)
        device = "" if first is None else str(first.device)
        moved = ModuleMove(self._next(), own_lines(frame), device, self.line_of_device(to))
        self._moves[type(module)] = moved.line
        last = self._moved.get(module)
        if last is not None and last.before == device != last.device:
            both = last.line, moved.line
            if both[::-1] not in self.swings:
                self.swings[both] = self.swings.get(both, 0) + 1
        for each in module.modules():
            before = self._moved.get(each)
            self._moved.set(each, moved._replace(before="" if before is None else before.device))

    def note_parameter(
        self,
        module: torch.nn.Module,
        name: str,
        parameter: torch.Tensor | None,
        frame: FrameType | None,
    ) -> None:
        """Record that a module registers a parameter; it may replace one that modules share."""
        old = module._parameters.get(name)
        places = self._registered.get(old) if old is not None and old is not parameter else None
        if places is not None and len(places) > 1 and len(self._untied) < _MOST_KEPT:
            self._untied.setdefault(own_lines(frame, most=1), places)
        if parameter is not None:
            known = self._registered.get(parameter) or []
            self._registered.set(parameter, [*known, (weakref.ref(module), name)])
            self._storages.note(parameter, (weakref.ref(module), name))
            if self._moved.get(module) is not None:
                own = self._replaced.get(module) or {}
                self._replaced.set(module, own | {name: (self._next(), own_lines(frame, most=1))})

    def note_filled(self, module: torch.nn.Module, frame: FrameType | None) -> None:
        """Record that a module took over the tensors of a state dict (`assign=True`)."""
        event = self._next(), own_lines(frame)
        for each in module.modules():
            self._filled.set(each, event)

    def note_state(self, optimizer: torch.optim.Optimizer, frame: FrameType | None) -> None:
        """Record that an optimizer loads its state, onto the devices of its parameters."""
        where = {str(p.device) for group in optimizer.param_groups for p in group["params"]}
        self._states.set(optimizer, StateLoad(own_lines(frame), " and ".join(sorted(where))))

    def note_device(self, device: object, frame: FrameType | None) -> None:
        """Record that a `torch.device` is made."""
        if len(self._devices) < _MOST_KEPT:
            self._devices[id(device)] = device, own_lines(frame)

    def note_refused(self, error: BaseException, frame: FrameType | None) -> None:
        """Record that a `torch.device` could not be made, or that a move failed."""
        if len(self.refused) < _MOST_KEPT:
            self.refused.setdefault(own_lines(frame), type(error).__name__)

    def note_generator(self, generator: torch.Generator, frame: FrameType | None) -> None:
        """Record that a generator is made."""
        own = frame is not None and not is_library(frame.f_code.co_filename)
        if own and len(self._generators) < _MOST_KEPT:  # ignore those of a DataLoader
            self._generators[own_lines(frame)] = generator

    def note_loader(self, loader: Any, frame: FrameType | None) -> None:
        """Record that a DataLoader is made."""
        shuffles = isinstance(loader.sampler, torch.utils.data.RandomSampler)
        shuffles = shuffles and loader.generator is None
        if len(self.loaders) < _MOST_KEPT:
            self.loaders.append(
                Loader(
                    own_lines(frame), bool(loader.pin_memory), shuffles, bool(loader.num_workers)
                )
            )

    def note_copied(self, tensor: torch.Tensor, step: int, frame: FrameType | None) -> None:
        """Record that a trained tensor is copied to another device after `step` optimizer steps."""
        known = self._copied.get(tensor)
        if known is None:
            own = own_frame(frame)
            name = "" if own is None else variable(own, tensor)
            known = CopiedWeight(name, line_of(own), again=False)
        self._copied.set(tensor, known._replace(again=known.again or step > 0))

    def note_values(self, tensor: torch.Tensor, frame: FrameType | None) -> None:
        """Record that a frame of the user's code set the `.data` of a tensor."""
        if frame is not None and not is_library(frame.f_code.co_filename):
            self._values.set(tensor, own_lines(frame))

    def note_autocast(self, kind: str, frame: FrameType | None) -> None:
        """Record that autocast is entered for a kind of device."""
        if len(self.autocasts) < _MOST_KEPT:
            self.autocasts[own_lines(frame, most=1)] = kind

    def note_left(self, tensor: torch.Tensor, to: object, frame: FrameType | None) -> None:
        """Record a `.to` that did not move a tensor; `to` is the given device."""
        line = own_lines(frame, most=1)
        if line:
            self._left.note(tensor, (line, self.line_of_device(to)))

    def note_left_by(self, tensor: torch.Tensor, method: str) -> None:
        """Record a tensor on another device whose owner has a method to move its tensors."""
        self._left_by.note(tensor, method)

    # -- queries -----------------------------------------------------------------------------------

    def line_of_device(self, device: object) -> str:
        """The line that made a `torch.device`; "" if it is not known."""
        found = self._devices.get(id(device))
        return "" if found is None or found[0] is not device else found[1]

    def devices_named(self, name: str) -> list[str]:
        """The lines that made a `torch.device` of this name."""
        return [line for device, line in self._devices.values() if str(device) == name and line]

    def told_of(self, made: object) -> str:
        """The code that made a module or an optimizer, with its lines; "" if it is not known."""
        found = self._made.get(made)
        return "" if found is None else with_code(found[1])

    def lines_of(self, module: torch.nn.Module) -> str:
        """The code that made a module, and the code that moved it last, as far as known."""
        moved = self._moved.get(module)
        line = "" if moved is None else with_code(moved.line)
        return "; ".join(dict.fromkeys(each for each in (self.told_of(module), line) if each))

    def moved(self, module: torch.nn.Module) -> ModuleMove | None:
        """The last call that moved a module, or a module that contains it; None without one."""
        return self._moved.get(module)

    def moves_of(self, kind: type) -> str:
        """The lines of the latest call that moved a module of a class; "" if there is none."""
        return self._moves.get(kind, "")

    def filled_since(self, module: torch.nn.Module) -> str:
        """The line that gave a module the tensors of a state dict after its last move; or ""."""
        moved, filled = self._moved.get(module), self._filled.get(module)
        return (
            "" if filled is None or (moved is not None and moved.number > filled[0]) else filled[1]
        )

    def made_since(self, model: torch.nn.Module) -> dict[str, str]:
        """The outermost submodules, and parameters, that came after their model was moved.

        By their names, with the code. Submodules that were moved themselves, or have no parameters,
        are left out.
        """
        moved = self._moved.get(model)
        found: dict[str, str] = {}
        for name, each in model.named_modules() if moved is not None else ():
            last, replaced = self._moved.get(each), self._replaced.get(each) or {}
            for key, (number, lines) in replaced.items():
                if last is not None and number > last.number and key in each._parameters:
                    found[f"{name}.{key}".lstrip(".")] = with_code(lines)
            number, lines = self._made.get(each) or (0, "")
            inner = any(name.startswith(f"{outer}.") for outer in found)
            if moved is None or number < moved.number or inner or self._moved.get(each) is not None:
                continue
            if next(each.parameters(), None) is not None:
                found[name] = with_code(lines)
        return found

    def lost_ties(self, names: Mapping[torch.nn.Module, str]) -> list[tuple[str, str, str]]:
        """Shared parameters that were separated, because a line replaced each one by its own copy.

        Each item is the second parameter, the first, and the line; `names` has the dotted names of
        modules.
        """
        found = []
        for line, places in self._untied.items():
            now: dict[int, str] = {}
            for module, name in ((ref(), name) for ref, name in places):
                parameter = None if module is None else module._parameters.get(name)
                if module is None or parameter is None or module not in names:
                    continue
                if parameter.requires_grad:
                    now.setdefault(id(parameter), f"{names[module]}.{name}".lstrip("."))
            first, *others = now.values() or ("",)
            if others and _MOVES.search(code_at(line)):
                found.append((others[0], first, line))
        return found

    def old_values(
        self, names: Mapping[torch.nn.Module, str], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, str]:
        """The tensors that share the memory that a parameter had before it was moved.

        By their names, each with the parameter's; `names` has the dotted names of modules.
        """
        found: dict[str, str] = {}
        for name, tensor in tensors.items():
            of, parameter = self._storages.about(tensor) or (None, "")
            module = None if of is None else of()
            now = None if module is None else module._parameters.get(parameter)
            if module is None or now is None or module not in names:
                continue
            if key_of(now) != key_of(tensor):
                found[name] = f"{names[module]}.{parameter}".lstrip(".")
        return found

    def holds_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor was that of a parameter when a module registered it."""
        return self._storages.about(tensor) is not None

    def state_loaded(self, optimizer: torch.optim.Optimizer) -> StateLoad | None:
        """The call that loaded an optimizer's state, with the device at that time; or None."""
        return self._states.get(optimizer)

    def generators_on(self, kind: str) -> list[str]:
        """The lines that made the generators on a kind of device."""
        return [line for line, each in self._generators.items() if each.device.type == kind]

    def left(self, tensor: torch.Tensor) -> str:
        """Why a tensor was not moved: a `.to` with its line, or a method of its owner; or ""."""
        method = self._left_by.about(tensor)
        found: tuple[str, str] | None = self._left.about(tensor)
        if found is None:
            return "" if method is None else f"{method}{DOES_NOT_MOVE}"
        line, chosen = found
        device = f", for its device is {with_code(chosen)}" if chosen else ""
        return f"{with_code(line)} leaves it there{device}"

    def copied_untrained(self, trained: Container[int]) -> list[CopiedWeight]:
        """The copies, made before the first step, of parameters that get a gradient in vain.

        `trained` are the ids of the tensors that an optimizer has.
        """
        return [
            copied
            for each, copied in self._copied.items()
            if isinstance(each, torch.nn.Parameter) and id(each) not in trained
            if each.grad is not None and not copied.again and copied.line
        ]

    def values_set(self, model: torch.nn.Module) -> str:
        """The lines that last set the `.data` of the first parameter for which code did; or ""."""
        return next(filter(None, map(self._values.get, model.parameters())), None) or ""

    def copied_once(self, tensor: torch.Tensor) -> CopiedWeight | None:
        """The copy of a trained tensor that was copied only before the first step; else None."""
        found = self._copied.get(tensor)
        return None if found is None or found.again else found

    def _next(self) -> int:
        self._number += 1
        return self._number


def own_lines(frame: FrameType | None, *, made: object = None, most: int = _MOST_LINES) -> str:
    """The line of the user's own code that a frame runs, with the user's lines that called it.

    The constructors of the object `made` are left out.
    """
    lines: list[str] = []
    for _ in range(_MOST_FRAMES):
        if frame is None or len(lines) == most or "runpy" in frame.f_code.co_filename:
            break  # the program began here
        code = frame.f_code
        if not is_library(code.co_filename):
            within = made is not None and code.co_name == "__init__"
            if not within or locals_of(frame).get(code.co_varnames[0]) is not made:
                lines.append(line_of(frame))
        frame = frame.f_back
    return CALLED.join(dict.fromkeys(lines))


def with_code(lines: str) -> str:
    """The code at the first of some lines, followed by all lines: `net = Net() at train.py:3`."""
    code = code_at(lines.partition(CALLED)[0])
    return f"{code} at {lines}" if code else ""
