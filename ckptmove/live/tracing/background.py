"""What is known of the program's own code around a run: names, lines, and what chose the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .history import Copied, History, Loaded
from .library_calls import LibraryCall
from .operations import indexed
from .program_source import Choice
from .recorder import Recorder
from .source_lines import raising_module


@dataclass(frozen=True)
class Background:
    """Facts about the program; what is not known is empty."""

    variable: str = ""  #: what the user calls the model
    choice: Choice | None = None  #: what chose another device for it
    #: A call of a library that should have been given a device.
    library: LibraryCall | None = None
    was_there: bool = False  #: whether the model ran on the device before
    added: Sequence[str] = ()  #: parts of the model that were made after it was moved
    optimizer_line: str = ""  #: the code that made the optimizer, and its line
    #: Where the optimizer loaded its state, if its parameters were elsewhere then.
    loaded_early: Loaded | None = None
    stale: Sequence[Copied] = ()  #: trained tensors of which only a copy from before is used
    receiver: str = ""  #: the variable of the module that raised the exception
    history: History | None = None  #: what the program made and moved


#: Nothing is known of the program.
UNKNOWN_PROGRAM = Background()


def background(
    recorder: Recorder, model: torch.nn.Module | None, error: BaseException | None
) -> Background:
    """What a recorder knows of the program around a model and the exception that ended it."""
    names, history = recorder.names, recorder.history
    variable = "" if model is None else names.variable(model)
    there = variable, recorder.home, recorder.call_it
    added = {} if model is None else history.made_since(model)
    return Background(
        variable=variable,
        choice=None if model is None else recorder.callers.choice_for(model, *there),
        library=recorder.callers.library,
        was_there=recorder.callers.was_there(model),
        added=[
            f"{name} was made after the model was moved: {line}" for name, line in added.items()
        ],
        optimizer_line=names.optimizer_line,
        loaded_early=names.loaded_early,
        stale=_stale(recorder),
        receiver="" if error is None else raising_module(error),
        history=history,
    )


def _stale(recorder: Recorder) -> list[Copied]:
    """What optimizers changed elsewhere, though it was copied to the device only before that."""
    if recorder.steps < 2:
        return []
    names, history = recorder.names, recorder.history
    groups = (group for each in names.optimizers for group in each.param_groups)
    trained = [each for group in groups for each in group["params"] if names.fed(each)]
    away = [each for each in trained if indexed(each.device) != recorder.home]
    return [found for each in away if (found := history.copied_once(each)) is not None]
