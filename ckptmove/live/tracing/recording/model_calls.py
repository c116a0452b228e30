"""Record calls of models: arguments on other devices, the model's device, and its outputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch

from ....reports.events import Operand, Site
from ..program.loop_tensors import LOOP, loop_tensors
from ..program.source_lines import line_of, user_frame
from .device_choice import Callers
from .operations import indexed, is_big, is_table, tensors_of
from .tally import Tally
from .tensor_names import TensorNames


class ModelCalls:
    """The calls of models in a run.

    Attributes:
        callers: the callers of models that are on another device.
        count: the number of calls.
    """

    def __init__(
        self,
        names: TensorNames,
        callers: Callers,
        tally: Tally,
        home: torch.device,
        call_it: Callable[[str], str],
        note: Callable[..., None],
    ) -> None:
        """`call_it` returns the displayed name of a device; `note` is the recorder's `_note`."""
        self.callers = callers
        self.count = 0
        self._names = names
        self._tally = tally
        self._home = home
        self._call_it = call_it
        self._note = note
        self._begun = False

    def note_call(
        self, module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any], frame: FrameType | None
    ) -> list[torch.Tensor]:
        """Record a model call from a frame, and its arguments; returns the tensors in them."""
        self.count += 1

        def argument_name(argument: str, tensor: torch.Tensor) -> str:
            if frame is None or indexed(tensor.device) == self._home:
                return argument
            return self._names.argument_name(argument, tensor, module, frame)

        given = self._names.called(module, args, kwargs, argument_name, frame)
        away = [each for each in given if is_big(each) and indexed(each.device) != self._home]
        alone = next(itertools.chain(module.parameters(), module.buffers()), None) is None
        if away and not (alone and len(away) == sum(map(is_big, given))):  # else it runs there
            kind = type(module).__name__
            site = Site("forward", self._names.of_module(module) or kind, "call", line_of(frame))
            devices = sorted({self._call(each) for each in away})
            self._note("input", site, " and ".join(devices), 0, away)
        return given

    def note_place(self, module: torch.nn.Module, frame: FrameType | None, *, once: bool) -> None:
        """Record a model that is called on another device, and what its callers say about devices.

        `once` means that no step was taken yet: a model that runs only once may be slow.
        """
        parameter = next(module.parameters(), None)
        if frame is None or parameter is None:
            return
        if indexed(parameter.device) == self._home:
            self.callers.note_there(module)
            if not self._begun:  # operations elsewhere before this were not a step
                self._begun = True
                self._tally.forget("stray", "mixed")
            return
        first = self.callers.note(module, frame)
        if is_table(module):
            return  # a table may be too large for the device
        if first:
            self.note_loop(frame)
        if once:
            return
        name = self._names.variable(module) or type(module).__name__
        where = self._call(parameter)
        key = "apart", Site("forward", name, "call", line_of(frame)), where
        self._note(*key, 0, [])
        if key in self._tally.happenings:
            source = self.callers.history.lines_of(module)
            owner = type(module).__name__
            shown = Operand(name, where, (), owner=owner, source=source)
            self._tally.happenings[key].operands = (shown,)

    def note_result(self, module: torch.nn.Module, output: Any, frame: FrameType | None) -> None:
        """Remember the outputs of a model on another device."""
        parameter = next(module.parameters(), None)
        if parameter is None or indexed(parameter.device) == self._home or is_table(module):
            return
        away = [each for each in tensors_of(output) if indexed(each.device) != self._home]
        self._names.gave(module, away, line_of(frame))

    def note_loop(self, frame: FrameType | None) -> None:
        """Record other tensors of the same batch on other devices; they would fail next."""
        for line, name, tensor in loop_tensors(user_frame(frame)):
            if is_big(tensor) and indexed(tensor.device) != self._home:
                key = "input", Site("", "", LOOP, line), self._call(tensor)
                self._note(*key, 0, [])
                shape = tuple(tensor.shape)
                self._tally.happenings[key].operands += (Operand(name, key[2], shape, "input"),)

    def _call(self, tensor: torch.Tensor) -> str:
        return self._call_it(str(indexed(tensor.device)))
