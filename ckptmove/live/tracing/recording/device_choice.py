"""Find the line of a program that chose the device, if the model is on the wrong device.

The program's source is parsed, never run. The frames that called the model show the values of
variables. The source shows where these values come from: an argument's default, the environment, a
condition.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch

from ....manifest.device import kind_of
from ...inventory.ownership import own_move
from ..program.given_device import choice_of_argument
from ..program.library_calls import LibraryCall, call_without_device
from ..program.program_source import Choice, source_of
from ..program.settings import KINDS, device_named_by
from ..program.source_lines import (
    CALLED,
    fields_of,
    file_of,
    is_a,
    line_in,
    locals_of,
    own_frame,
    variable,
)
from ..program.syntax import (
    code_at,
    function_at,
    last_line_of_function,
    line_of_argument,
    line_of_attribute,
    tree_of,
)
from .history import History, ModuleMove, with_code

_MOST_CALLERS = 8
_MOST_ITEMS = 64  # the most items of an object or dict that may hold settings


class CallerValues(NamedTuple):
    """What the frames that called a model say about devices."""

    files: tuple[str, ...]  #: the user's own files, the innermost first
    values: Mapping[str, str]  #: variables that name a device
    truths: Mapping[str, bool]  #: variables that are True or False
    set_at: str = ""  #: the line that sets the attribute that holds the model, or ""


class Callers:
    """The callers of models that are on another device."""

    def __init__(self, history: History) -> None:
        """`history` tells which modules were moved, and which lines made devices."""
        self.history = history
        self._seen: weakref.WeakKeyDictionary[torch.nn.Module, CallerValues] = (
            weakref.WeakKeyDictionary()
        )
        self._there: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        #: The library call without a device around a model on another device, or a failure.
        self.library: LibraryCall | None = None

    def note_there(self, model: torch.nn.Module) -> None:
        """Remember that a model ran on the device."""
        self._there.add(model)

    def was_there(self, model: torch.nn.Module | None) -> bool:
        """Whether a model ran on the device."""
        return model in self._there

    def note_library(self, frame: FrameType | None) -> None:
        """Remember which call of a library, if any, should have been given a device."""
        if self.library is None:
            self.library = call_without_device(frame)

    def note(self, model: torch.nn.Module, frame: FrameType) -> bool:
        """Remember what the first callers of a model say; returns whether these are the first."""
        if model in self._seen:
            return False
        self._seen[model] = seen_from(frame)._replace(set_at=_line_that_keeps(model, frame))
        self.note_library(frame)
        return True

    def choice_for(
        self, model: torch.nn.Module, variable: str, wanted: object, call: Callable[[str], str]
    ) -> Choice | None:
        """The code that chose another device for a model, or None.

        `call` returns the displayed name of a device.
        """
        parameter = next(model.parameters(), None)
        seen = self._seen.get(model)
        if seen is None or parameter is None:
            return None
        is_on, there = call(str(parameter.device)), call(str(wanted))
        history = self.history
        moved, made = history.moved(model), history.told_of(model)
        if self.was_there(model):
            if moved is not None and call(moved.device) == is_on:
                line = with_code(moved.line)
                return Choice(f"{line} moved it there", "drop that, or move it back after", ())
            if values := history.values_set(model):
                fix = "bring the values to the device of their parameter first: .to(p.device)"
                return Choice(f"{with_code(values)} gives it values on {is_on}", fix, ())
            return line_that_moved(seen, variable or "model", is_on)
        if moved is not None and call(moved.device) == is_on and call(moved.before) == there:
            line, lines = with_code(moved.line), (made,) if made else ()
            return Choice(f"{line} moved it there", "drop that, or move it back after", lines)
        was_there = moved is not None and call(moved.device) == there
        filled = history.filled_since(model)
        if filled and was_there:
            title = f"{with_code(filled)} puts the tensors of the state dict in it (assign=True)"
            fix = f'load them with map_location="{there}"; or move the model after that'
            return Choice(f"{title}, and they are on {is_on}", fix, (made,) if made else ())
        own = own_move(model)
        if own and moved is None:
            title = f"{own}, which is called instead of torch's, moves no parameter"
            end = last_line_of_function(own.rpartition(" at ")[2])
            fix = f"call that of super(), too, before it ends at {end}"
            return Choice(title, fix, (made,) if made else ())
        found = chosen(seen, variable, is_on, there, made)
        if moved is not None and moved.chosen == "" and moved.device == is_on:
            refused = _refused_before(moved, history.refused)
            if refused:
                why = f"{with_code(refused)} raised {history.refused[refused]}"
                why += f", and {with_code(moved.line)} came after that"
                named = line_of_argument(refused.partition(CALLED)[0])
                fix = f'mend the device there: "{there}"'
                fix = f'write "{there}" at {named}: {code_at(named)}' if named else fix
                return Choice(why, fix, found.evidence if found is not None else ())
        if moved is None and not (found is not None and found.title):
            known = not seen.set_at or seen.set_at in made
            others = [] if known else [f"{with_code(seen.set_at)} keeps it"]
            another = "" if _is_of_torch(model) else history.moves_of(type(model))
            if another:
                others.append(f"{with_code(another)} moved another {type(model).__name__}")
            old = found or Choice("", "", ())
            found = old._replace(evidence=(*old.evidence, *others)) if others else found
        told = found is not None and bool(found.title)
        if moved is not None and not moved.chosen and not told and call(moved.device) == is_on:
            given = choice_of_argument(moved.line, is_on, there)
            if given is not None:
                return given
            title, fix = f"{with_code(moved.line)} puts it there", f'there, move it to "{there}"'
            return Choice(title, fix, (made,) if made and made != with_code(moved.line) else ())
        if moved is None or was_there or not moved.chosen:
            return found
        return _followed(moved.chosen, seen, is_on, there, history.refused, found)


def _is_of_torch(model: torch.nn.Module) -> bool:
    """Whether a model's class is from torch; a program may have many models of such a class."""
    return type(model).__module__.partition(".")[0] == "torch"


def _line_that_keeps(model: torch.nn.Module, frame: FrameType) -> str:
    """The line that sets the attribute of `self` that holds a model; "" if there is none."""
    own = own_frame(frame)
    name = "" if own is None else variable(own, model)
    if own is None or not name.startswith("self."):
        return ""
    return line_of_attribute(type(locals_of(own)["self"]), name.removeprefix("self."))


def seen_from(frame: FrameType | None) -> CallerValues:
    """The files of a frame and its callers, and their variables that name devices or are bools."""
    files: dict[str, None] = {}
    values: dict[str, str] = {}
    truths: dict[str, bool] = {}

    def note(name: str, value: Any) -> None:
        if type(value) is bool:
            truths.setdefault(name, value)
        named = str(value) if is_a(value, str) or is_a(value, torch.device) else ""
        if kind_of(named) in KINDS and len(named) < 16:
            values.setdefault(name, named)

    for _ in range(_MOST_CALLERS):
        frame = own_frame(frame)
        if frame is None:
            break
        files[frame.f_code.co_filename] = None
        for name, value in {**frame.f_globals, **locals_of(frame)}.items():
            note(name, value)
            held = {} if name.startswith("__") else fields_of(value)
            if len(held) <= _MOST_ITEMS:
                for key, each in held.items():
                    note(f"{name}.{key}", each)
            if is_a(value, dict) and len(value) <= _MOST_ITEMS and name != "__builtins__":
                for key, each in value.items():
                    note(f"{name}[{key!r}]", each)
        frame = frame.f_back
    return CallerValues(tuple(files), values, truths)


def _refused_before(moved: ModuleMove, refused: Mapping[str, str]) -> str:
    """The lines of a device or move that failed in the function of this move; or ""."""
    function = function_at(moved.line.partition(CALLED)[0])
    for lines in refused:
        first = lines.partition(CALLED)[0]
        if function and function_at(first) == function:
            return lines
    return ""


def _followed(
    lines: str,
    seen: CallerValues,
    is_on: str,
    wanted: str,
    refused: Mapping[str, str],
    found: Choice | None,
) -> Choice | None:
    """The code that chose the device made at `lines`; `found` if that code tells nothing new."""
    file, number = file_of(lines.partition(CALLED)[0])
    source = source_of(file, wanted, seen.truths)
    known = () if found is None else (found.title, *found.evidence)
    if source is None or any(line_in(file, number) in each for each in known):
        return found
    why = source.device_at(number, kind_of(is_on), refused)
    if why is None:
        return found
    return why._replace(evidence=(*why.evidence, *(each for each in known if each)))


def chosen(
    seen: CallerValues, model: str, is_on: str, wanted: str, known: str = ""
) -> Choice | None:
    """The code that chose the device of a model, or None.

    Args:
        seen: what the frames that called the model say.
        model: the user's variable of the model, or "".
        is_on: the device of the model.
        wanted: the device where it should be.
        known: the code that made the model, or "".
    """
    made = known
    for file in seen.files:
        source = source_of(file, wanted, seen.truths)
        if source is None:
            continue
        found = source.hidden() or source.assigned(seen.values, is_on) or source.guarded(model)
        found = found or source.uncalled(model or "model")
        found = found or source.settled(model or "model", kind_of(is_on))
        if found is not None:
            return found
        made = made or source.made(model or "model")
    return Choice("", "", (made,)) if made else None


def line_that_moved(seen: CallerValues, model: str, is_on: str) -> Choice | None:
    """The line that moved a model to another device, or None."""
    for file in seen.files:
        tree = tree_of(file)
        for each in () if tree is None else ast.walk(tree):
            if not isinstance(each, ast.Call) or not isinstance(each.func, ast.Attribute):
                continue
            to = (
                device_named_by(each.args[0])
                if each.func.attr == "to" and each.args
                else each.func.attr
            )
            if ast.unparse(each.func.value) == model and to == kind_of(is_on):
                line = f"{ast.unparse(each)} at {line_in(file, each.lineno)}"
                return Choice(f"{line} moved it there", f"drop {line}, or move it back after", ())
    return None
