"""Watching a model: what is told of it, and in which words; `tracing_there` has most of it."""

from __future__ import annotations

import ast
import linecache
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmove
from ckptmove import UsageError
from ckptmove.live.tracing.program.syntax import tree_of
from tests.conftest import ROOT
from tests.devices.second_device import needs_second_device
from tests.live.watched import Net, causes, line_of

# -- what is told ----------------------------------------------------------------------------------


def test_a_step_where_it_should_be_is_told_and_nothing_is_wrong() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ckptmove.trace(model, optimizer, device="cpu") as watch:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    assert watch.verdicts == ()
    assert watch.transfers == watch.created == []
    assert watch.diagnosis is not None
    assert watch.diagnosis.ok
    assert (watch.trace.calls, watch.trace.steps) == (1, 1)
    assert set(watch.trace.phases) >= {"forward", "backward", "optimizer"}
    assert set(watch.trace.operations) == {"cpu"}
    assert str(watch).splitlines()[0] == (
        "Net on cpu: no device fault in the first training step; of a GPU this says nothing"
    )


def test_the_last_whole_step_is_told_in_order() -> None:
    """Hooks of the modules are the oracle of what ran after what."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ran = list[str]()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    with ckptmove.trace(model, optimizer, device="cpu") as watch:
        for _ in range(3):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
        model(torch.ones(3, 4))  # of a step that was not finished
    spans, left_out, step = watch.trace.timeline
    forward = [each.module for each in spans if each.phase == "forward"]
    phases = [each.phase for each in spans]
    assert (left_out, step) == (0, 3)
    assert forward == [name for name in ran[: len(ran) // 4] if name in forward]
    assert {each.split(".")[0] for each in forward} >= {"inner", "outer"}
    order = [each for each in dict.fromkeys(phases) if each]
    assert order == ["forward", "backward", "optimizer"]
    lines = {each.source for each in spans if each.module == "inner"}
    assert [line.endswith(line_of("# inner")) for line in lines] == [True]
    assert {each.device for each in spans} == {"cpu"}
    once = sum(each.operations for each in spans if each.phase == "forward")
    assert watch.trace.phases["forward"] == 4 * once


def test_what_was_not_finished_is_told_where_no_step_was() -> None:
    model = Net()
    watch = ckptmove.trace(model, device="cpu")
    with pytest.raises(RuntimeError), watch:
        model(torch.ones(3, 5))
    assert "optimizer" not in {each.phase for each in watch.trace.timeline.spans}
    watch = ckptmove.trace(model, device="cpu")
    with watch:
        model(torch.ones(3, 4))
    assert [each.phase for each in watch.trace.timeline.spans][-1] == "forward"


def test_the_best_device_of_the_machine_is_meant_if_none_is_named() -> None:
    watch = ckptmove.trace(Net())
    assert watch.device == ("cuda:0" if torch.cuda.is_available() else watch.device)
    assert watch.device.partition(":")[0] in ("cpu", "cuda", "mps", "xpu")


def test_an_optimizer_that_steps_is_found() -> None:
    model, other = Net(), Net()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with ckptmove.trace(model, device="cpu") as watch:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    assert causes(watch) == ["optimizer-of-old-parameters"]
    assert "inner.weight, inner.bias, outer.weight, outer.bias" in watch.verdicts[0].title


def test_an_optimizer_of_other_modules_too_is_right() -> None:
    """Two heads are trained, and the model below is not, though it could be."""
    model, head, beside = Net(), nn.Linear(2, 1), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*head.parameters(), *beside.parameters()], lr=0.1)
    with ckptmove.trace(nn.Sequential(model, head), optimizer, device="cpu") as watch:
        out = model(torch.ones(3, 4))
        (head(out).sum() + beside(out).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert causes(watch) == []


# -- exceptions ------------------------------------------------------------------------------------


def test_what_has_nothing_to_do_with_devices_is_said_to() -> None:
    model = Net()
    watch = ckptmove.trace(model, device="cpu")
    with pytest.raises(RuntimeError), watch:
        model(torch.ones(3, 5))
    assert causes(watch) == ["step-failed"]
    assert "has nothing to do with devices" in watch.verdicts[0].title
    assert line_of("# inner") in watch.verdicts[0].evidence[0]


# -- leaving no trace ------------------------------------------------------------------------------


def test_values_are_those_that_there_are_without() -> None:
    torch.manual_seed(0)
    models = [Net() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(3, 4)
    for watched, model in enumerate(models):
        optimizer = torch.optim.Adam(model.parameters())
        with ckptmove.trace(model, device="cpu") if watched else torch.enable_grad():
            model(x).square().sum().backward()
            optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


# -- use and misuse --------------------------------------------------------------------------------


def test_a_block_is_watched_once() -> None:
    watch = ckptmove.trace(Net(), device="cpu")
    assert watch.verdicts == ()
    assert str(watch) == "nothing has been watched yet"
    with watch:
        pass
    with pytest.raises(UsageError, match="already watched"), watch:
        pass


def test_watches_may_be_nested() -> None:
    model = Net()
    with ckptmove.trace(model, device="cpu") as outer:
        model(torch.ones(3, 4))
        with ckptmove.trace(model, device="cpu") as inner:
            model(torch.ones(3, 4))
    assert (outer.trace.calls, inner.trace.calls) == (2, 1)
    assert outer.trace.operations["cpu"] > inner.trace.operations["cpu"]
    assert outer.verdicts == inner.verdicts == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"a": 1},), "is not a torch.nn.Module"),
        ((Net(), "adam"), "is not a torch.optim.Optimizer"),
        ((Net(), None, "gpu"), "gpu"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    model, optimizer, device = (*arguments, None, None)[:3]
    with pytest.raises(UsageError, match=message):
        ckptmove.trace(model, optimizer, device=device)


# -- a device with values --------------------------------------------------------------------------


@pytest.mark.slow
@needs_second_device
def test_all_there_is_on_a_second_device() -> None:
    """The device is for a whole process."""
    quietly = ("-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist")
    done = subprocess.run(
        [sys.executable, "-B", "-m", "pytest", *quietly, "tests/live/tracing_there.py"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        pytest.fail(done.stdout, pytrace=False)


# -- the source of the user's program --------------------------------------------------------------

METRIC = """\
from torch import nn

class Metric(nn.Module):
    def forward(self, p, y):
        self.update(p, y)

    def update(self, p, y):
        raise RuntimeError(
            "Encountered different devices in metric calculation (see stacktrace for details). "
            f"such as `metric={self.__class__.__name__}(...).to(device)`"
        )
"""


@pytest.mark.parametrize(
    ("call", "fixed"),
    [
        ("metric(p, y)", "metric"),
        ("print(metric(p, y))", "metric"),
        ("total = float(metric(p, y))", "metric"),
        ("log('acc', metric(p.argmax(1), y))", "metric"),
        ("metrics['acc'].update(p.argmax(1), y)", "metrics['acc']"),
        ("print(type(metric)()(p, y))", "Metric"),  # that has no variable: its class
    ],
)
def test_the_metric_to_move_goes_by_its_variable(call: str, fixed: str, tmp_path: Path) -> None:
    library, script = tmp_path / "site-packages" / "scores.py", tmp_path / "train.py"
    library.parent.mkdir()
    library.write_text(METRIC)
    known: dict[str, Any] = {"p": torch.ones(3, 2), "y": torch.ones(3), "log": print}
    exec(compile(METRIC, library, "exec"), known)
    script.write_text(f"metric, metrics = Metric(), {{'acc': Metric()}}\n{call}\n")
    watch = ckptmove.trace(Net(), device="cpu")
    with pytest.raises(RuntimeError), watch:
        exec(compile(script.read_text(), script, "exec"), known)
    assert causes(watch) == ["criterion-never-moved"]
    assert f"`{call}` at " in watch.verdicts[0].title
    assert watch.verdicts[0].fix.startswith(f'{fixed}.to("cpu");')


def test_the_tree_of_a_file_is_of_the_text_that_is_known(tmp_path: Path) -> None:
    script = tmp_path / "cell.py"
    assert tree_of(str(script)) is None
    for text in ("first = 1\n", "then = (\n    2\n)\n"):
        script.write_text(text)
        linecache.checkcache(str(script))  # as a traceback that is shown does
        tree = tree_of(str(script))
        assert tree is not None
        assert ast.unparse(tree) == ast.unparse(ast.parse(text))
        assert tree_of(str(script)) is tree
