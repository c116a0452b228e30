"""Facts about the program's own code around a run: names, lines, and the choice of the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ....display.phrases import join_names
from ...inventory.holdings import Ownership, holdings
from ...inventory.ownership import UnregisteredTensor, unregistered_tensors
from ..program.library_calls import LibraryCall
from ..program.program_source import Choice
from ..program.source_lines import raising_module
from ..program.syntax import line_of_data
from ..recording.history import CopiedWeight, History, StateLoad
from ..recording.operations import indexed
from ..recording.recorder import Recorder
from ..recording.updates import Read


@dataclass(frozen=True)
class Background:
    """Facts about the program; unknown facts are empty."""

    variable: str = ""  #: the user's variable of the model
    choice: Choice | None = None  #: the code that chose another device for it
    #: A call of a library that should have been given a device.
    library: LibraryCall | None = None
    was_there: bool = False  #: whether the model ran on the device before
    added: Sequence[str] = ()  #: submodules and parameters that came after the model was moved
    optimizer_line: str = ""  #: the code that made the optimizer, with its line
    #: Where the optimizer loaded its state, if its parameters were on another device then.
    loaded_early: StateLoad | None = None
    stale: Sequence[CopiedWeight] = ()  #: trained tensors that are used only as an old copy
    lost: Sequence[CopiedWeight] = ()  #: parameters used only as a copy, which no optimizer has
    #: Lines that cut values from the graph, with the parameters that get no gradient then.
    cuts: Sequence[tuple[str, Sequence[str]]] = ()
    reads: Sequence[Read] = ()  #: lines that read the gradient of a copy, which stays None
    #: Parameters that are a copy of another parameter, the other one, and the line of the copy.
    lost_ties: Sequence[tuple[str, str, str]] = ()
    #: Parameters that shared their values with another one before they were moved, the other one,
    #: and the line that shared them, or "".
    separated: Sequence[tuple[str, str, str]] = ()
    #: Unregistered tensors that are the old values of a moved parameter, each with its name.
    old_values: Mapping[str, str] = field(default_factory=dict)
    #: Tensors without a module that are trained on another device: each variable and its line.
    variables: Mapping[str, str] = field(default_factory=dict)
    #: Unregistered tensors of the other modules that were called.
    unregistered: Sequence[UnregisteredTensor] = ()
    called_at: str = ""  #: the user's lines that called the function that failed
    given_at: str = ""  #: the line that gave this function a tensor on another device
    receiver: str = ""  #: the variable of the module that raised the exception
    receiver_made: str = ""  #: the code that made it
    history: History | None = None  #: the objects that the program made and moved


#: Nothing is known of the program.
UNKNOWN_PROGRAM = Background()


def background(
    recorder: Recorder, model: torch.nn.Module | None, error: BaseException | None
) -> Background:
    """The facts that a recorder has about the program, a model and the exception that ended it."""
    names, history = recorder.names, recorder.history
    variable = "" if model is None else names.variable(model)
    there = variable, recorder.home, recorder.call_it
    added: dict[str, list[str]] = {}  # by their code
    for name, line in ({} if model is None else history.made_since(model)).items():
        added.setdefault(line, []).append(name)
    modules = {m: name for each in names.models for name, m in each.named_modules()}
    receiver, raising = ("", None) if error is None else raising_module(error)
    hidden = () if model is None or error is None else holdings(model).of(Ownership.UNREGISTERED)
    return Background(
        variable=variable,
        choice=None if model is None else recorder.callers.choice_for(model, *there),
        library=recorder.callers.library,
        was_there=recorder.callers.was_there(model),
        added=[
            f"{join_names(made)} {'was' if len(made) == 1 else 'were'} made after the model was "
            f"moved: {line}"
            for line, made in added.items()
        ],
        optimizer_line=names.optimizers.line,
        loaded_early=names.optimizers.loaded_early,
        stale=_stale(recorder),
        lost=_lost(recorder),
        cuts=recorder.cuts.cuts(names.models),
        reads=tuple(recorder.updates.reads.values()),
        lost_ties=[
            *recorder.stale.lost_ties(names.models),
            *history.lost_ties(modules),
        ],
        separated=[
            (second, first, line_of_data(type(each), second))
            for each in names.models
            for second, first in recorder.stale.separated(each)
        ],
        old_values=history.old_values(modules, {each.name: each.tensor for each in hidden}),
        variables=_variables(recorder),
        unregistered=[
            found
            for each in (() if error is None else names.models)
            if each is not model
            for found in unregistered_tensors(holdings(each))
            if found.line  # else it may be hidden on purpose
        ],
        called_at=recorder.called_at,
        given_at=recorder.given_at,
        receiver=receiver,
        receiver_made="" if raising is None else history.told_of(raising),
        history=history,
    )


def _variables(recorder: Recorder) -> dict[str, str]:
    """The variables of tensors that are trained on another device, with their makers."""
    trained = ((each.name, each.tensor()) for each in recorder.names.optimizers.variables)
    return {
        name: recorder.names.origin(tensor)
        for name, tensor in trained
        if tensor is not None and indexed(tensor.device) != recorder.home
    }


def _lost(recorder: Recorder) -> list[CopiedWeight]:
    """Parameters of no module that are used only as a copy, and that no optimizer has."""
    names, known = recorder.names, recorder.names.optimizers.known
    if recorder.steps < 2 or not known:
        return []
    owned = {id(p) for each in names.models for p in each.parameters()}
    owned |= {id(p) for each in known for group in each.param_groups for p in group["params"]}
    return recorder.history.copied_untrained(owned)


def _stale(recorder: Recorder) -> list[CopiedWeight]:
    """Tensors trained on another device, but copied to the device only before the first step."""
    if recorder.steps < 2:
        return []
    names, history = recorder.names, recorder.history
    groups = (group for each in names.optimizers.known for group in each.param_groups)
    trained = [each for group in groups for each in group["params"] if names.optimizers.fed(each)]
    away = [each for each in trained if indexed(each.device) != recorder.home]
    return [found for each in away if (found := history.copied_once(each)) is not None]
