"""Watching models on a second device with values; `test_trace` runs this in its own process."""

from __future__ import annotations

import gc
import sys
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import optimizer as steps
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import ckptmove
from ckptmove import Diagnosis
from tests.devices.second_device import DEVICE, install
from tests.live.watched import Net, causes, line_of

install()


def moved(shift: torch.Tensor | None = None) -> Net:
    return Net(shift).to(DEVICE)


def test_diagnosis_goes_through_json() -> None:
    model = moved(torch.ones(4))
    watch = ckptmove.trace(model, device=DEVICE)
    with pytest.raises(RuntimeError), watch:
        model(torch.empty(3, 4, device=DEVICE))
    assert watch.diagnosis is not None
    told = watch.diagnosis.to_json()
    assert Diagnosis.from_json(told).to_json() == told
    assert told["trace"]["said"].startswith("RuntimeError")


def test_the_variable_of_the_caller_names_what_was_not_moved() -> None:
    model = moved()
    images = torch.ones(3, 4)
    watch = ckptmove.trace(model, device=DEVICE)
    with pytest.raises(RuntimeError), watch:
        model(images)
    assert causes(watch) == ["batch-never-moved"]
    assert watch.verdicts[0].title == "the batch is on cpu: images"
    fix = watch.verdicts[0].fix.partition(";")[0]
    assert fix.startswith('images = images.to("privateuseone:0") after ')  # there is no loop


def test_a_large_tensor_that_each_step_copies() -> None:
    model, data = moved(), torch.ones(1 << 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ckptmove.trace(model, optimizer, device=DEVICE) as watch:
        for _ in range(4):
            model(data.to(DEVICE)[:3]).sum().backward()
            optimizer.step()
    assert causes(watch) == ["copied-each-step"]
    assert watch.verdicts[0].title.startswith("data (1.0 MB) is copied to privateuseone:0 at ")


def test_an_argument_without_a_variable_goes_by_the_models_name_for_it() -> None:
    model = moved()
    watch = ckptmove.trace(model, device=DEVICE)
    with pytest.raises(RuntimeError), watch:
        model(torch.ones(3, 4))
    assert watch.verdicts[0].title == "the batch is on cpu: x"


def test_what_the_model_holds_goes_by_its_path() -> None:
    model = nn.ModuleDict({"net": moved(torch.ones(4))})
    x = torch.empty(3, 4, device=DEVICE)
    watch = ckptmove.trace(model, device=DEVICE)
    with pytest.raises(RuntimeError), watch:
        model["net"](x)
    assert causes(watch) == ["unregistered-tensor"]
    assert watch.verdicts[0].title.startswith("net.shift is not registered")
    assert line_of("# shifted") in watch.verdicts[0].evidence[0]


def test_what_a_layer_holds_was_made_by_the_layer() -> None:
    model = moved()
    x = torch.empty(3, 4, device=DEVICE)
    watch = ckptmove.trace(model, device=DEVICE)
    with pytest.raises(RuntimeError), watch:
        model.shift = nn.TransformerEncoderLayer(4, 2).linear1.weight[0].detach()  # a layer
        model(x)
    told = "\n".join(watch.verdicts[0].evidence)
    assert "shift, made by nn.TransformerEncoderLayer at " in told
    assert line_of("# a layer", __file__) in told
    watch = ckptmove.trace(model, device=DEVICE)
    with pytest.raises(RuntimeError), watch:
        weight = nn.Linear(4, 4).weight.data
        x.mm(weight)
    assert watch.verdicts[0].title.startswith("nn.Linear at ")
    assert watch.verdicts[0].title.endswith(" makes weight on cpu")


def test_a_copy_that_is_dropped_is_told_with_its_line() -> None:
    model = moved()
    x = torch.ones(3, 4)
    watch = ckptmove.trace(model, device=DEVICE)
    with pytest.raises(RuntimeError), watch:
        x.to(DEVICE)  # dropped
        model(x)
    assert causes(watch) == ["to-result-dropped"]
    assert line_of("# dropped", __file__) in watch.verdicts[0].title
    assert "x stays on cpu" in watch.verdicts[0].title
    assert watch.verdicts[0].fix.startswith('x = x.to("privateuseone:0")')


def test_the_timeline_tells_of_copies_and_waits() -> None:
    model = moved()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ckptmove.trace(model, optimizer, device=DEVICE) as watch:
        for _ in range(2):
            images = torch.ones(3, 4).to(DEVICE)
            loss = model(images).sum()
            loss.backward()
            optimizer.step()
            loss.item()
    spans = watch.trace.timeline.spans
    copied = [each.copied for each in spans if each.copied]
    assert copied == [{f"cpu→{DEVICE}": 3 * 4 * 4}]
    assert [each.waits for each in spans if each.waits] == [1]  # after the step before
    assert {each.device for each in spans if each.phase} == {DEVICE}


def test_a_copy_that_nobody_needs_is_no_fault() -> None:
    model = moved()
    x = torch.ones(3, 4)
    with ckptmove.trace(model, device=DEVICE) as watch:
        x.to(DEVICE)
        model(torch.empty(3, 4, device=DEVICE))
        x.sum()
    assert watch.verdicts == ()


def test_a_backward_pass_is_told_by_the_lines_of_the_forward() -> None:
    model = Net()
    with ckptmove.trace(model, device=DEVICE) as watch:  # so that everything is elsewhere
        model(torch.ones(3, 4)).sum().backward()
    strays = [each.site for each in watch.trace.of("stray") if each.site.phase == "backward"]
    lines = {each.source.rpartition("/")[2] for each in strays if each.module == "inner"}
    assert lines == {line_of("# inner")}
    assert {"inner", "outer"} <= {each.module for each in strays}


def test_waits_are_told_only_of_training_and_of_the_users_own_lines() -> None:
    model = moved()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ckptmove.trace(model, device=DEVICE) as watch:
        model(torch.empty(3, 4, device=DEVICE)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert causes(watch) == []


def test_an_exception_comes_through_and_says_what_to_do() -> None:
    model = moved()
    x = torch.ones(3, 4)
    with pytest.raises(RuntimeError) as raised, ckptmove.trace(model, device=DEVICE):
        model(x)
    if sys.version_info >= (3, 11):
        (note,) = raised.value.__notes__
        assert note.startswith("ckptmove: the batch is on cpu: x. Fix: x = x.to(")


def test_an_exception_that_was_caught_is_not_held_against_a_later_one() -> None:
    model = moved()
    watch = ckptmove.trace(model, device=DEVICE)
    with pytest.raises(KeyError), watch:
        with suppress(RuntimeError):
            model(torch.ones(3, 4))
        model(torch.empty(3, 4, device=DEVICE))
        raise KeyError("key")
    assert causes(watch) == ["step-failed"]
    assert watch.verdicts[0].evidence[0].startswith("KeyError: 'key'")


def test_a_call_that_never_comes_to_an_operation_is_told() -> None:
    """A recurrent network looks at its operands itself."""
    model = nn.LSTM(4, 3).to(DEVICE)
    hidden = (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3, device=DEVICE))
    x = torch.empty(5, 2, 4, device=DEVICE)
    watch = ckptmove.trace(model, device=DEVICE)
    with pytest.raises(RuntimeError), watch:
        model(x, hidden)
    assert causes(watch) == ["batch-never-moved"]
    assert "hidden[0]" in watch.verdicts[0].title or "hx.0" in watch.verdicts[0].title


class Trainer:
    """Calls what it holds."""

    def __init__(self, criterion: nn.Module) -> None:
        self.criterion = criterion

    def step(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss."""
        loss: torch.Tensor = self.criterion(out, y)
        return loss


def test_weights_of_a_loss_are_told_with_what_holds_it() -> None:
    """Which only its call makes known."""
    model = moved()
    weighted = nn.BCEWithLogitsLoss(pos_weight=torch.ones(2))
    x, y = (torch.empty(3, size, device=DEVICE) for size in (4, 2))
    watch = ckptmove.trace(model, device=DEVICE)
    with pytest.raises(RuntimeError), watch:
        weighted(model(x), y)
    assert causes(watch) == ["criterion-never-moved"]
    assert watch.verdicts[0].title == "weighted was never moved: its pos_weight is on cpu"
    assert watch.verdicts[0].fix.startswith('weighted.to("privateuseone:0")')
    watch = ckptmove.trace(model, device=DEVICE)
    with pytest.raises(RuntimeError), watch:
        Trainer(weighted).step(model(x), y)
    assert watch.verdicts[0].title.startswith("self.criterion was never moved")


def test_what_is_made_like_another_is_told_with_its_maker() -> None:
    class Masked(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.ones_like(x, device="cpu")  # mask
            return super().forward(x * mask)

    model = Masked().to(DEVICE)
    x = torch.empty(3, 4, device=DEVICE)
    watch = ckptmove.trace(model, device=DEVICE)
    with pytest.raises(RuntimeError), watch:
        model(x)
    assert causes(watch) == ["made-elsewhere"]
    title = watch.verdicts[0].title
    assert title.startswith("torch.ones_like at ")
    assert f"{line_of('# mask', __file__)} makes mask on cpu" in title


def state_of_torch() -> list[object]:
    """What a watch might leave behind."""
    return [
        nn.Module._apply,
        nn.Module.__call__,
        torch.load,
        torch.save,
        torch.inference_mode,
        torch.cuda.is_available,
        torch.optim.Adam.__init__,
        list(hooks._global_forward_pre_hooks),
        list(hooks._global_forward_hooks),
        list(hooks._global_forward_hooks_always_called),
        list(steps._global_optimizer_pre_hooks),
        list(steps._global_optimizer_post_hooks),
        len(_get_current_function_mode_stack()),
        len(_get_current_dispatch_mode_stack()),
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_it_was(fails: bool) -> None:
    model = moved()
    before = state_of_torch()
    x = torch.ones(3, 4) if fails else torch.empty(3, 4, device=DEVICE)
    try:
        with ckptmove.trace(model, device=DEVICE):
            assert state_of_torch() != before
            model(x)
    except RuntimeError:
        assert fails
    assert state_of_torch() == before


def test_no_tensor_and_no_model_is_kept() -> None:
    model = Net(torch.ones(4))
    optimizer = torch.optim.Adam(model.parameters())
    watch = ckptmove.trace(model, optimizer, device=DEVICE)
    with watch:
        x = torch.ones(3, 4)
        out = model(x)
        out.sum().backward()
        optimizer.step()
        gone = [weakref.ref(each) for each in (x, out, model.inner.weight.grad)]
        optimizer.zero_grad()
        del x, out
        gc.collect()
        assert [each() for each in gone] == [None, None, None]
    kept = weakref.ref(model)
    del model, optimizer, watch
    gc.collect()
    assert kept() is None


def test_an_exception_keeps_no_tensor() -> None:
    model = moved()
    x = torch.ones(3, 4)
    gone = weakref.ref(x)
    watch = ckptmove.trace(model, device=DEVICE)
    with pytest.raises(RuntimeError) as raised, watch:
        model(x)
    del x, raised
    gc.collect()
    assert gone() is None
    assert watch.verdicts


def test_right_and_wrong() -> None:
    model = Net().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.ones(3, 4)
    with ckptmove.trace(model, device=DEVICE) as watch:
        loss = model(x.to(DEVICE)).sum()
        loss.backward()
        optimizer.step()
    assert watch.verdicts == ()
    assert [(each.devices, each.count) for each in watch.transfers] == [(f"cpu→{DEVICE}", 1)]
    with ckptmove.trace(model, device=DEVICE) as watch:
        loss = model(x.to(DEVICE)).sum()
        loss.backward()
        optimizer.step()
        assert f"{loss:.3f}"  # told
    assert causes(watch) == ["host-waits"]
    assert line_of("# told", __file__) in watch.verdicts[0].title
    assert [each.count for each in watch.syncs if each.asked] == [1]
    assert watch.diagnosis is not None
    assert watch.diagnosis.ok
    failing = ckptmove.trace(model, device=DEVICE)
    with pytest.raises(RuntimeError), failing:
        model(x)
    assert failing.verdicts[0].title == "the batch is on cpu: x"


def test_indices_on_the_cpu_are_not_blamed_for_values_there() -> None:
    x = torch.zeros(4, 3, device=DEVICE)
    rows = torch.tensor([0, 1])
    watch = ckptmove.trace(moved(), device=DEVICE)
    with watch:
        x[rows] = torch.ones((), dtype=torch.float32)  # a number, which may be anywhere
    assert causes(watch) == []
    watch = ckptmove.trace(moved(), device=DEVICE)
    with pytest.raises(RuntimeError), watch:
        x[rows] = torch.ones(2, 3)  # values
    assert len(causes(watch)) == 1
    assert "torch.ones" in watch.verdicts[0].title


def test_a_fix_speaks_of_an_optimizer_only_if_there_is_one() -> None:
    model, x = Net(), torch.ones(3, 4, device=DEVICE)
    watch = ckptmove.trace(model, device=DEVICE)
    with pytest.raises(RuntimeError), watch:
        model(x)
    assert watch.verdicts[0].fix == f'model.to("{DEVICE}")'
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = ckptmove.trace(model, device=DEVICE)  # which does not know it
    with pytest.raises(RuntimeError), watch:
        model(x)
    assert "before the optimizer is created" in watch.verdicts[0].fix
    assert optimizer.param_groups
