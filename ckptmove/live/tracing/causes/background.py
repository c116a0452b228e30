"""What is known of the program's own code around a run: names, lines, and what chose the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..program.library_calls import LibraryCall
from ..program.program_source import Choice
from ..program.source_lines import raising_module
from ..recording.history import Copied, History, Loaded
from ..recording.operations import indexed
from ..recording.recorder import Recorder


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
    #: Lines that cut the values of parameters without a gradient from the graph, with their names.
    cuts: Sequence[tuple[str, Sequence[str]]] = ()
    #: Parameters that are a copy of another one, the other one, and the line of the copy.
    lost_ties: Sequence[tuple[str, str, str]] = ()
    #: Tensors that are trained elsewhere, without a module: each variable, and the line of it.
    variables: Mapping[str, str] = field(default_factory=dict)
    called_at: str = ""  #: where the function that failed was called by the user's code
    given_at: str = ""  #: where the function that failed was given a tensor from elsewhere
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
        optimizer_line=names.optimizers.line,
        loaded_early=names.optimizers.loaded_early,
        stale=_stale(recorder),
        cuts=recorder.cuts.cuts(names.models),
        lost_ties=[
            *recorder.stale.lost_ties(names.models),
            *history.lost_ties({m: n for each in names.models for n, m in each.named_modules()}),
        ],
        variables=_variables(recorder),
        called_at=recorder.called_at,
        given_at=recorder.given_at,
        receiver="" if error is None else raising_module(error),
        history=history,
    )


def _variables(recorder: Recorder) -> dict[str, str]:
    """What is trained elsewhere, by its variable, with what made it."""
    trained = ((each.name, each.tensor()) for each in recorder.names.optimizers.variables)
    return {
        name: recorder.names.origin(tensor)
        for name, tensor in trained
        if tensor is not None and indexed(tensor.device) != recorder.home
    }


def _stale(recorder: Recorder) -> list[Copied]:
    """What optimizers changed elsewhere, though it was copied to the device only before that."""
    if recorder.steps < 2:
        return []
    names, history = recorder.names, recorder.history
    groups = (group for each in names.optimizers.known for group in each.param_groups)
    trained = [each for group in groups for each in group["params"] if names.optimizers.fed(each)]
    away = [each for each in trained if indexed(each.device) != recorder.home]
    return [found for each in away if (found := history.copied_once(each)) is not None]
