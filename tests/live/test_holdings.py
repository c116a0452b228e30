"""What a report finds wherever it hides, and what it leaves alone."""

from __future__ import annotations

import functools
import logging
import shelve
import sys
import threading
import types
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import ckptmove
from ckptmove import CheckFailed, UsageError
from tests.making.living import entries, fake, on_cuda


def holding(**attributes: object) -> nn.Module:
    """A layer with attributes."""
    model = nn.Linear(2, 2)
    for name, value in attributes.items():
        object.__setattr__(model, name, value)
    return model


def hidden(model: nn.Module, **others: Any) -> list[str]:
    return list(entries(ckptmove.report(model, **others), "attribute", "hook", "class attribute"))


class Box:
    """A class of the user's."""

    def __init__(self, **held: object) -> None:
        vars(self).update(held)


# -- where tensors hide ----------------------------------------------------------------------------


def fileless() -> object:
    """An object of a class whose module has no file."""
    module = types.ModuleType("fileless")
    exec("class Held:\n    pass\n", vars(module))
    found = module.Held()
    found.t = torch.ones(2)
    return found


def slotted() -> object:
    class Slotted:
        __slots__ = ("__t", "empty")

        def __init__(self) -> None:
            self.__t = torch.ones(2)

        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    return Slotted()


def told_by_none() -> object:
    @dataclass
    class Told:
        t: torch.Tensor

        def __getattribute__(self, name: str) -> object:
            raise ValueError(name)

    return Told(torch.ones(2))


def cached() -> object:
    t = torch.ones(2)

    @functools.lru_cache
    def inner() -> torch.Tensor:
        return t

    return inner


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (
            lambda: torch.distributions.Normal(torch.zeros(2), torch.ones(2)),
            ["x.loc", "x.scale"],
        ),
        (fileless, ["x.t"]),
        (slotted, ["x._Slotted__t"]),
        (told_by_none, ["x.t"]),
        (cached, ["x.__wrapped__.t"]),
        (lambda: types.SimpleNamespace(t=torch.ones(1)), ["x.t"]),
        (lambda: UserDict(t=torch.ones(1)), ["x.t"]),
        (lambda: ChainMap({"t": torch.ones(1)}), ["x.maps.0.t"]),
        (lambda: types.MappingProxyType({"t": torch.ones(1)}), ["x.t"]),
        (lambda: defaultdict(None, t=torch.ones(1)), ["x.t"]),
        (lambda: OrderedDict(t=torch.ones(1)), ["x.t"]),
        (lambda: deque([torch.ones(1)]), ["x.0"]),
    ],
)
def test_tensors_are_found_in_objects_of_any_class(make: Any, names: list[str]) -> None:
    assert hidden(holding(x=make())) == names


def test_what_a_cache_of_transformers_holds() -> None:
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    cache.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), 0)
    found = hidden(holding(cache=cache))
    assert [name for name in found if name.endswith((".keys", ".values"))] == [
        "cache.layers.0.keys",
        "cache.layers.0.values",
    ]


def test_worlds_are_left_alone(tmp_path: Path) -> None:
    class Log(logging.Logger):
        t = None

    class Job(threading.Thread):
        pass

    class Data(torch.utils.data.Dataset[torch.Tensor]):
        def __init__(self) -> None:
            self.t = torch.ones(3)

    log, job = Log("log"), Job()
    vars(log)["t"] = vars(job)["t"] = torch.ones(2)
    model = holding(
        log=log,
        job=job,
        data=Data(),
        module=torch,
        kind=Box,
        lock=threading.Lock(),
        optimizer=torch.optim.SGD([torch.ones(1, requires_grad=True)]),
    )
    assert hidden(model) == []
    lightning = pytest.importorskip("lightning")
    trainer = lightning.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    vars(trainer)["t"] = torch.ones(1)
    assert hidden(holding(trainer=trainer)) == []


def test_a_helper_that_holds_a_module_is_looked_into() -> None:
    model = holding()
    teacher = nn.Sequential(nn.BatchNorm1d(2))
    object.__setattr__(model, "helper", Box(net=model, anchors=torch.ones(3), teacher=teacher))
    assert hidden(model) == [
        "helper.anchors",
        *(f"helper.teacher.0.{each}" for each in teacher[0].state_dict()),
    ]
    assert "make it a submodule" in ckptmove.report(model).warnings[1]
    assert hidden(model, teacher=teacher) == ["helper.anchors"]


def test_hooks_of_parameters_and_optimizers_are_looked_into() -> None:
    model = nn.Linear(2, 2)
    mask, total, seen = torch.ones(2, 2), torch.ones(2, 2), torch.ones(2)

    def masked(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * mask

    def add(parameter: torch.Tensor) -> None:
        total.add_(parameter)

    def before(*_: object) -> None:
        seen.add_(1)

    model.weight.register_hook(masked)
    model.weight.register_post_accumulate_grad_hook(add)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_step_pre_hook(before)
    report = ckptmove.report(model, optimizer)
    assert [(e.name, str(e.section)) for e in entries(report, "hook").values()] == [
        ("weight.hook masked.mask", "model"),
        ("weight.hook add.total", "model"),
        ("optimizer.hook before.seen", "optimizer"),
    ]
    assert sum("let the hook read it from a buffer" in each for each in report.warnings) == 2


def test_nothing_of_a_container_of_the_user_runs(tmp_path: Path) -> None:
    class Lazy(Mapping[str, torch.Tensor]):
        def __init__(self) -> None:
            self.read = torch.ones(1)

        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Iterator[str]:
            raise OSError("the disk is gone")

        def __getitem__(self, key: str) -> torch.Tensor:
            raise OSError("the disk is gone")

    class Rows(dict[str, torch.Tensor]):
        items = values = keys = __iter__ = None  # type: ignore[assignment]  # as strange as can be

    class Line(list[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            raise OSError("the disk is gone")

    with shelve.open(str(tmp_path / "shelf")) as shelf:
        shelf["t"] = torch.zeros(2)
        held = {"lazy": Lazy(), "shelf": shelf, "proxy": types.MappingProxyType(Lazy())}
        rows, line = Rows(t=torch.ones(1)), Line([torch.ones(1)])
        assert hidden(holding(**held, rows=rows, line=line)) == ["lazy.read", "rows.t", "line.0"]


def test_what_a_class_holds_is_told() -> None:
    class Shared(nn.Module):
        table = torch.arange(4.0)
        rows = (torch.ones(2),)

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

    report = ckptmove.report(nn.Sequential(Shared(), Shared()))
    assert list(entries(report, "class attribute")) == ["0.table", "0.rows.0"]
    told, _ = report.warnings
    assert told.startswith("0.table is shared by every Shared, so model.to and ")


# -- how much work it is ---------------------------------------------------------------------------


def calls(act: Callable[[], object]) -> int:
    """How many functions are called meanwhile, those of C too."""
    count = 0

    def see(frame: object, event: str, about: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.slow
def test_the_work_grows_with_the_number_of_tensors() -> None:
    def work(n: int) -> int:
        model = holding(x=[torch.zeros(1) for _ in range(n)])
        return calls(lambda: ckptmove.report(model))

    work(10)  # what is imported and made once
    assert work(8_000) < 5 * work(2_000)


def test_deep_nesting_takes_little_work() -> None:
    value: list[object] = [torch.ones(1)]
    for _ in range(100_000):
        value = [value]
    model = holding(x=value, y=torch.ones(1))
    assert calls(lambda: ckptmove.report(model)) < 300_000
    report = ckptmove.report(model)
    assert list(entries(report, "attribute")) == ["y"]
    assert any("tensors may be missing from this list" in each for each in report.warnings)
    while value:  # or else Python frees it recursively
        value = value[0] if isinstance(value[0], list) else []


# -- what trains it --------------------------------------------------------------------------------


def test_what_is_trained_is_named_by_what_holds_it() -> None:
    layers = [nn.Linear(2, 2, bias=False)]
    z = torch.zeros(2, requires_grad=True)
    model = holding(z=z, layers=layers)
    trained: list[torch.Tensor] = [*model.parameters(), z, layers[0].weight]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    torch.cat([each.flatten() for each in trained]).sum().backward()
    optimizer.step()
    report = ckptmove.report(model, optimizer)
    assert list(entries(report, "optimizer state")) == [
        f"optimizer.state.{name}.momentum_buffer"
        for name in ("weight", "bias", "z", "layers.0.weight")
    ]
    assert not any("does not have" in each for each in report.warnings)
    assert any(
        w.startswith("z is not") and "self.z = nn.Parameter(…)" in w for w in report.warnings
    )


def test_optimizers_in_whatever_form() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    def names(given: Any) -> set[str]:
        state = entries(ckptmove.report(model, given), "optimizer state")
        return {name.partition(".state.")[0] for name in state}

    assert names({"body": optimizer}) == {"optimizer.body"}
    assert names(each for each in [optimizer]) == {"optimizer"}
    assert names((optimizer, optimizer)) == {"optimizer.0", "optimizer.1"}
    for wrong in (torch.tensor(1.0), "adam", 5, torch.optim.Adam, model, [None]):
        with pytest.raises(UsageError, match=r"is not a torch\.optim\.Optimizer"):
            names(wrong)
    with pytest.raises(UsageError, match="a state dict is not a torch") as raised:
        names(optimizer.state_dict())
    assert raised.value.hint == "pass the optimizer itself"


def test_an_optimizer_among_others_is_one() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = {e.name: e for e in ckptmove.report(model, critic=optimizer).tensors}
    step = found["critic.state.weight.step"]
    assert (str(step.section), str(step.role), step.state_key) == (
        "optimizer",
        "optimizer step",
        "weight",
    )


def test_strictness_is_of_a_group() -> None:
    model = on_cuda(nn.Linear(2, 2))
    weight, bias = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [weight], "capturable": True}, {"params": [bias]}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    for each in (weight, bias):
        optimizer.state[each] = {"momentum_buffer": torch.tensor(1.0)}
    (told,) = ckptmove.report(model, optimizer).warnings
    assert told.startswith(
        "optimizer.state.weight.momentum_buffer: on cpu, and the parameter on cuda:0. "
    )


# -- what is given besides -------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, 3, "cpu", [], {}, {"lr": [0.1]}, torch.device("cpu")])
def test_words_among_others_are_refused(value: object) -> None:
    with pytest.raises(
        UsageError, match=r"^schedular=.* holds neither a tensor nor a " "module"
    ) as raised:
        ckptmove.report(nn.Linear(2, 2), schedular=value)
    assert raised.value.hint is not None
    assert raised.value.hint.startswith("did you mean 'scheduler'? ")


def test_what_holds_nothing_yet_may_be_given() -> None:
    model = nn.Linear(2, 2)
    ckptmove.report(model, scaler=torch.amp.GradScaler("cpu"), ema=None, nets=[nn.ReLU()])


def test_names_that_are_the_models_own_are_refused() -> None:
    model = nn.ModuleDict({"ema": nn.Linear(2, 2)})
    with pytest.raises(UsageError, match="'ema' is also the name of a part of the model"):
        ckptmove.report(model, ema=nn.Linear(2, 2))


@pytest.mark.slow
def test_a_wrapped_model_goes_by_the_names_of_what_it_wraps() -> None:
    inner = nn.Sequential(nn.Linear(2, 2))
    wrapped: list[Any] = [torch.compile(inner), nn.DataParallel(inner)]
    for model in wrapped:
        first = ckptmove.report(model, ema=torch.optim.swa_utils.AveragedModel(inner)).tensors
        keys = {e.name: e.state_key for e in first}
        (name,) = [each for each, _ in model.named_parameters() if each.endswith("0.weight")]
        assert (keys[name], keys["ema.module.0.weight"]) == ("0.weight", "0.weight")


def test_the_lengths_of_a_packed_sequence_belong_on_the_cpu() -> None:
    model = on_cuda(nn.Linear(1, 2))
    packed = pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    data = fake("cuda:0", 5, 1).data
    report = ckptmove.report(model, batch=packed._replace(data=data))
    assert report.warnings == ()
    report.require("cuda:0")
    with pytest.raises(CheckFailed, match=r"'batch\.data' is on cpu"):
        ckptmove.report(model, batch=packed).require("cuda:0")


# -- what has no values ----------------------------------------------------------------------------


def test_only_what_is_wholly_on_meta_is_emptied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"), nn.Linear(2, 2))
    model[2].weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    model.register_buffer("mask", torch.ones(2, device="meta"), persistent=False)
    report = ckptmove.report(model)
    assert report.verdict == "mixed: cpu 100.0 %, meta 0.0 % (4 tensors without values)"
    (told,) = report.warnings
    assert told.endswith(
        "to_empty(device=…) of '1', then load the state; load '2.weight' by "
        "model.load_state_dict(…, assign=True); assign 'mask' again; no state dict has it"
    )
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("x", torch.zeros(2, device="meta"), persistent=False)
    assert "to_empty" not in ckptmove.report(model).warnings[0]


# -- attributes that name a device -----------------------------------------------------------------


def test_devices_that_a_module_keeps_up_itself_are_not_told() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here = torch.device("cpu")
            self.there = torch.device("cpu")

        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            self.here = fn(torch.zeros(1)).device
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    assert [v.name for v in ckptmove.report(Kept()).values_naming_devices] == ["there"]
    lightning = pytest.importorskip("lightning")
    assert ckptmove.report(lightning.LightningModule()).values_naming_devices == ()
    metrics = pytest.importorskip("torchmetrics")
    assert ckptmove.report(metrics.MeanMetric()).values_naming_devices == ()
