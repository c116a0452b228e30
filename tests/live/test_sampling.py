"""Watching some steps of a long loop: which ones, and what is told of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import ckptmove
from ckptmove import UsageError
from ckptmove.live.tracing.recording.sampling import EVERY
from ckptmove.live.tracing.trace import Watch
from tests.devices.second_device import DEVICE, apart
from tests.live.watched import Net, causes, line_of

_SOME = [1, 2, 3, 4, 7, 14, 21, 28]  # of 30 steps


class Seen(nn.Module):
    """Notes the steps in which a mode watches it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.calls = 0
        self.watched: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if _get_current_dispatch_mode_stack():
            self.watched.append(self.calls)
        out: torch.Tensor = self.layer(x)
        return out


def train(model: nn.Module, steps: int, device: str = "cpu") -> None:
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4, device=device)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("every", "steps", "expected"),
    [
        (None, 30, _SOME),
        (1, 6, [1, 2, 3, 4, 5, 6]),
        (5, 11, [1, 2, 3, 4, 5, 10]),
        (None, 4, [1, 2, 3, 4]),
    ],
)
def test_some_steps_are_watched(every: int | None, steps: int, expected: list[int]) -> None:
    """What lies on the dispatcher's stack is the oracle."""
    model = Seen()
    with ckptmove.trace(model, device="cpu", every=every or EVERY) as watch:
        train(model, steps)
    assert model.watched == expected
    assert (watch.trace.steps, watch.trace.watched) == (steps, len(expected))
    assert watch.trace.calls == steps
    assert watch.trace.timeline.step == expected[-1]
    assert _get_current_dispatch_mode_stack() == _get_current_function_mode_stack() == []


def test_the_result_says_how_many_and_claims_no_more() -> None:
    model = Net()
    with ckptmove.trace(model, device="cpu") as watch:
        train(model, 30)
    lines = str(watch).splitlines()
    assert lines[0].startswith(
        "Net on cpu: no device fault in the 8 of 30 training steps that were watched"
    )
    assert "nothing is wrong" not in str(watch)
    assert any("watched 8 of 30 steps" in each and "every=1" in each for each in lines)
    (ran,) = [each for each in lines if each.startswith("ran: ")]
    assert ran.startswith("ran: 30 calls, 30 steps; watched 8 of 30 steps; operations: ")
    with ckptmove.trace(model, device="cpu", every=1) as watch:
        train(model, 30)
    assert "no device fault in the first 30 training steps" in str(watch)
    assert "watched" not in str(watch)


def test_without_steps_all_is_watched() -> None:
    model = Seen()
    with ckptmove.trace(model, device="cpu"), torch.no_grad():
        for _ in range(9):
            model(torch.ones(1, 4))
    assert model.watched == list(range(1, 10))


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "7"])
def test_what_is_no_number_of_steps_is_refused(every: Any) -> None:
    with pytest.raises(UsageError, match="every="):
        ckptmove.trace(Net(), every=every)


class Silent(TorchDispatchMode):
    """A mode of the user's own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Another."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


silent: Any = Silent


def test_modes_of_the_users_own_stay_where_they_are() -> None:
    """Entered within any step, and left in a later one."""
    for first in (3, 4, 5, 6, 7):
        for last in (first, first + 1, first + 4):
            model = Seen()
            own: list[Any] = [silent(), Calls()]
            optimizer = torch.optim.Adam(model.parameters())
            with ckptmove.trace(model, device="cpu"):
                for step in range(1, 18):
                    model(torch.ones(3, 4)).sum().backward()
                    if step == first:
                        _ = [each.__enter__() for each in own]
                    optimizer.step()
                    if step == last:
                        assert _get_current_dispatch_mode_stack()[-1] is own[0]
                        assert _get_current_function_mode_stack()[-1] is own[1]
                        _ = [each.__exit__(None, None, None) for each in own]
            assert _get_current_dispatch_mode_stack() == _get_current_function_mode_stack() == []
            assert model.watched[:4] == [1, 2, 3, 4]


def test_an_optimizer_that_steps_in_the_backward_pass() -> None:
    model = Net()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(
            lambda _, optimizer=optimizer: optimizer.step()
        )
    with ckptmove.trace(model, device="cpu") as watch:
        for _ in range(20):
            model(torch.ones(3, 4)).sum().backward()
    assert watch.trace.steps == 80
    assert causes(watch) == []
    assert _get_current_dispatch_mode_stack() == _get_current_function_mode_stack() == []


def test_watches_within_each_other() -> None:
    model = Seen()
    with ckptmove.trace(model, device="cpu") as outer:
        train(model, 5)
        with ckptmove.trace(model, device="cpu") as inner:
            train(model, 12)
        train(model, 4)
    assert (inner.trace.steps, inner.trace.watched) == (12, 5)
    assert (outer.trace.steps, outer.trace.watched) == (21, 6)
    assert _get_current_dispatch_mode_stack() == _get_current_function_mode_stack() == []


def test_a_parameter_that_is_first_trained_in_a_step_that_is_not_watched() -> None:
    """It is no parameter without an optimizer."""
    model, other = Net(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.inner.parameters(), *other.parameters()], lr=0.1)
    optimizer.add_param_group({"params": [*model.outer.parameters()]})
    with ckptmove.trace(model, optimizer, device="cpu") as watch:
        for step in range(12):
            out = model(torch.ones(3, 4)) if step == 5 else model.inner(torch.ones(3, 4))
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert causes(watch) == []


# -- faults, on a device with values ---------------------------------------------------------------


def train_until(at: int, model: nn.Module, optimizer: torch.optim.Optimizer, fault: Any) -> None:
    """A loop of which one step has a fault."""
    for step in range(1, 31):
        out = model(torch.ones(3, 4, device=DEVICE))
        if step == at:
            out = fault(model, out)
        out.sum().backward()
        optimizer.step()


def failing(model: nn.Module, at: int, fault: Any) -> Watch:
    """A watched loop of which one step has a fault that raises."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    watch = ckptmove.trace(model, optimizer, device=DEVICE)
    with pytest.raises(RuntimeError), watch:
        train_until(at, model, optimizer, lambda *args: fault(*args, optimizer))
    assert watch.trace.steps == at - 1
    return watch


def other_batch(model: nn.Module, out: torch.Tensor, _: Any) -> Any:
    samples = torch.ones(3, 4)
    return model(samples)


def made_there(model: nn.Module, out: torch.Tensor, _: Any) -> Any:
    return out + torch.randn(3, 2)  # made


def copied_there(model: nn.Module, out: torch.Tensor, _: Any) -> Any:
    kept = out.detach().cpu()  # copied
    return out + kept.sin()


@apart
def test_a_fault_that_raises_is_told_as_in_a_step_that_is_watched() -> None:
    for fault in (other_batch, made_there, copied_there):
        watched, unwatched = (failing(Net().to(DEVICE), at, fault) for at in (7, 9))
        assert unwatched.trace.watched == 5
        assert causes(unwatched) == causes(watched)
        assert causes(watched) != ["step-failed"]
        assert unwatched.verdicts[0].title == watched.verdicts[0].title
    assert line_of("# copied", __file__) in watched.verdicts[0].title
    assert _get_current_dispatch_mode_stack() == _get_current_function_mode_stack() == []


@pytest.mark.slow
@apart
def test_state_of_an_optimizer_that_stays_behind_between_two_steps_that_are_watched() -> None:
    def moves_state(model: nn.Module, out: torch.Tensor, optimizer: Any) -> torch.Tensor:
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].cpu()
        return out

    watch = failing(Net().to(DEVICE), 9, moves_state)
    assert causes(watch) == ["state-elsewhere"]
    assert _get_current_dispatch_mode_stack() == _get_current_function_mode_stack() == []


@pytest.mark.slow
@apart
def test_a_backward_pass_that_fails_is_not_said_to_have_nothing_to_do_with_devices() -> None:
    class Mixing(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(context: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * torch.ones(3, 2)

    mixing: Any = Mixing.apply
    watch = failing(Net().to(DEVICE), 9, lambda model, out, _: mixing(out))
    assert causes(watch) == ["operand-elsewhere"]


@pytest.mark.slow
@apart
def test_a_copy_is_not_called_unused_where_its_use_was_not_watched() -> None:
    model = Net().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ahead = torch.ones(3, 4)
    with ckptmove.trace(model, optimizer, device=DEVICE) as watch:
        for _ in range(9):
            x, following = ahead.to(DEVICE), torch.ones(3, 4)
            model(x).sum().backward()
            assert ahead.sum() == 12
            x = following.to(DEVICE)  # for the next step
            assert following.sum() == 12
            optimizer.step()
            model(x)
    assert causes(watch) == []
