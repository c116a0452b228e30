"""Find what is wrong with an optimizer: its parameters, and where its state is."""

from __future__ import annotations

from collections.abc import Iterator

from ...manifest.manifest import Role
from ...phrases import join_names
from ...reports.doctor import SLOW, Verdict
from .evidence import Evidence


def optimizer(case: Evidence) -> Iterator[Verdict]:
    """An optimizer that trains something else than the model."""
    foreign, untrained = case.belonging.foreign, case.belonging.untrained
    if not foreign or not untrained:
        return
    names = [name for name, _ in untrained]
    case.explain([name for name, _ in foreign])
    told = f"{len(foreign):,} of its tensors are not parameters of the model"
    same = [shape for _, shape in foreign] == [shape for _, shape in untrained]
    if same or case.belonging.shared:
        yield Verdict(
            "optimizer-of-old-parameters",
            "the optimizer holds old parameters: the model now has new ones, so "
            f"{join_names(names)} will never change",
            "create the optimizer after the step that replaces parameters: copying the model, "
            "load_state_dict(assign=True), wrapping it, a new head",
            (told,),
        )
        return
    yield Verdict(
        "optimizer-of-other-parameters",
        f"the optimizer holds other parameters than the model, so {join_names(names)} "
        "will never change",
        f"create it from this model: optimizer = {case.belonging.kind}(model.parameters())",
        (told,),
    )


def state(case: Evidence) -> Iterator[Verdict]:
    """State and gradients that are not with their parameter, and steps that are."""
    steps = [each for each in case.belonging.misplaced if each.role is Role.STEP]
    others = [each for each in case.belonging.misplaced if each.role is not Role.STEP]
    fix = f'ckptmove.move(model, optimizer, to="{case.device}") puts each where it belongs'
    if others:
        first = others[0]
        case.explain([each.name for each in others])
        yield Verdict(
            "state-elsewhere",
            f"{join_names([each.name for each in others])}: on {first.device}, and the parameter "
            f"on {first.wanted}",
            fix,
        )
    if steps:
        case.explain([each.name for each in steps])
        yield Verdict(
            "step-on-device",
            f"{join_names([each.name for each in steps])}: on {steps[0].device}, so the "
            "host waits for each of them at every step",
            f"{fix}; or make the optimizer with capturable=True or fused=True",
            severity=SLOW,
        )
