"""The recorder: what it tells of devices, and what it leaves alone."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

from ckptmove import UsageError
from ckptmove.live.tracing.program import source_lines
from ckptmove.live.tracing.recording import tally
from ckptmove.live.tracing.recording.recorder import Recorder
from ckptmove.reports.events import Trace

CPU = torch.device("cpu")
META = torch.device("meta")  # a second device that every machine has


class Wandering(nn.Module):
    """A model on `meta` that is not always there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Made elsewhere, computed elsewhere, moved."""
        made = torch.ones(2, 3)  # made
        made = torch.sin(made)  # computed
        out: torch.Tensor = self.inner(x + made.to("meta"))  # moved
        return out


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(text))


def traced() -> Trace:
    with META:
        module = Wandering()
    recorder = Recorder(module, META)
    with recorder:
        out = module(torch.empty(2, 3, device="meta"))
    with recorder:
        out.sum().backward()
    return recorder.trace()


def test_what_is_elsewhere_is_told_with_its_line() -> None:
    trace = traced()
    created, stray, moved = (trace.of(kind)[0] for kind in ("created", "stray", "transfer"))
    assert created.site.op == "aten.ones.default"
    assert created.nbytes == 24
    assert created.site.source.endswith(f"test_recording.py:{line_of('# made')}")
    assert stray.site.op == "aten.sin.default"
    assert stray.site.source.endswith(f":{line_of('# computed')}")
    assert (moved.devices, moved.nbytes) == ("cpu→meta", 24)
    assert moved.site.source.endswith(f":{line_of('# moved')}")
    assert trace.operations["cpu"] == 2
    assert trace.phases["backward"] > 3
    json.dumps(trace.to_json())


def test_modules_are_told_by_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
    recorder = Recorder(module, META)  # so that everything is elsewhere
    with recorder:
        module(torch.ones(1, 2))
    told = {each.site.op: each.site.module for each in recorder.trace().of("stray")}
    assert told["aten.relu.default"] == "1.0"
    assert "1.1" in {each.site.module for each in recorder.trace().of("stray")}
    assert recorder.running == []


def test_values_that_the_host_waits_for_are_counted() -> None:
    recorder = Recorder(nn.Identity(), CPU)
    with recorder:
        for _ in range(3):
            torch.ones(()).item()
        torch.ones(3).nonzero()
    told = {each.site.op: each.count for each in recorder.trace().of("sync")}
    assert told == {"aten._local_scalar_dense.default": 3, "aten.nonzero.default": 1}


def test_no_tensor_is_kept() -> None:
    recorder = Recorder(nn.Identity(), META)
    with recorder:
        tensor = torch.ones(3) + 1
        gone = weakref.ref(tensor)
        del tensor
        gc.collect()
    assert gone() is None


def test_sites_are_bounded() -> None:
    recorder = Recorder(nn.Identity(), META)
    before, tally.MOST_SITES = tally.MOST_SITES, 3
    try:
        with recorder:
            one = torch.ones(3)
            for each in (torch.sin, torch.cos, torch.tan, torch.exp, torch.log):
                each(one)
    finally:
        tally.MOST_SITES = before
    trace = recorder.trace()
    assert (trace.sites, len(trace.happenings), trace.dropped) == (3, 3, 3)


def test_an_exception_is_told_by_operation_and_module() -> None:
    module = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    recorder = Recorder(module, CPU)
    with pytest.raises(RuntimeError) as raised, recorder:
        module(torch.ones(1, 3))  # wrong
    assert source_lines.raised_in(raised.value, module) == "1"
    assert source_lines.raised_at(raised.value).endswith(f":{line_of('# wrong')}")
    site = recorder.trace().error
    assert site is not None
    assert site.module == "1"
    assert recorder.running == []


def in_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def test_what_other_threads_do_is_not_told() -> None:
    def train() -> None:
        other = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        checkpoint(other, torch.ones(1, 2), use_reentrant=False).sum().backward()
        optimizer.step()
        running.append(list(recorder.running))

    class Busy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            in_thread(train)
            running.append(list(recorder.running))
            return x + 1

    running: list[list[str]] = []
    module = nn.Sequential(Busy())
    turns: list[int] = []
    recorder = Recorder(module, CPU, turn=lambda each: turns.append(each.steps))
    with recorder:
        in_thread(train)
        module(torch.ones(2))
    assert (recorder.models.count, recorder.steps, turns) == (1, 0, [0])
    assert recorder.names.models == [module]
    assert recorder.names.optimizers.known == []
    assert running == [[], ["", "0"], ["", "0"]]


def test_two_threads_may_record_each_its_own() -> None:
    models = [nn.Linear(2, 2) for _ in range(2)]
    recorders = [Recorder(model, CPU) for model in models]
    both = threading.Barrier(2)

    def record(recorder: Recorder, model: nn.Module) -> None:
        with recorder:
            both.wait()
            model(torch.ones(1, 2))
            both.wait()

    threads = [
        threading.Thread(target=record, args=each) for each in zip(recorders, models, strict=True)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [each.names.models for each in recorders] == [[each] for each in models]
    assert [each.models.count for each in recorders] == [1, 1]


def test_a_recorder_that_runs_is_not_entered_again() -> None:
    recorder = Recorder(nn.Identity(), CPU)
    before = list(hooks._global_forward_pre_hooks)
    with recorder:
        within = list(hooks._global_forward_pre_hooks)
        with pytest.raises(UsageError), recorder:
            pass
        assert list(hooks._global_forward_pre_hooks) == within
        nn.Identity()(torch.ones(1))
    assert recorder.models.count == 1
    assert list(hooks._global_forward_pre_hooks) == before


def test_packages_of_any_environment_are_libraries() -> None:
    for folder in (
        "/srv/me/.local/lib/python3.11/site-packages",
        "/usr/lib/python3/dist-packages",
    ):
        file = f"{folder}/skorch/net.py"
        assert source_lines.is_library(file)
        assert source_lines.line_in(file, 3) == "skorch/net.py:3"
    assert not source_lines.is_library("/srv/me/site/train.py")


class Nosy:
    """An object of the user's, such as a proxy, whose code runs when somebody looks at it."""

    looked: ClassVar[list[str]] = []

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        self.looked.append("__class__")
        return object

    @property
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]
        self.looked.append("__dict__")
        return {}


def test_no_code_of_a_variable_runs_to_name_a_tensor() -> None:
    nosy, nested = Nosy(), {"nosy": Nosy()}
    module, batch = nn.Linear(3, 3), {"x": torch.ones(2, 3, device="meta"), "nosy": nosy}
    recorder = Recorder(module, CPU)
    with recorder, pytest.raises(RuntimeError):
        torch.add(module(torch.ones(2, 3)), batch["x"], out=nosy and nested.get("out"))  # type: ignore[call-overload]
    assert [each.name for each in recorder.trace().operands if each.device == "meta"] == [
        "batch['x']"
    ]
    assert Nosy.looked == []


@pytest.mark.parametrize("updates", [True, False])
def test_values_computed_from_gradients_are_updates(updates: bool) -> None:
    """Code that keeps only a norm of each gradient changes nothing."""
    weight, norms = torch.ones(3, requires_grad=True), []
    with Recorder(None, CPU) as recorder:
        for _ in range(3):
            (gradient,) = torch.autograd.grad((weight * 2).sum(), weight)
            norms.append(gradient.norm())
            if updates:
                weight = (weight - 0.1 * gradient).detach().requires_grad_()
        torch.stack(norms)
    assert recorder.backwards == 3
    assert recorder.is_idle is not updates
