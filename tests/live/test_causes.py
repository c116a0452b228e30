"""Root causes of what was found, as plain data: which are named, how badly, and in which words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ckptmove.live.inventory.holdings import holdings
from ckptmove.live.inventory.manifest import manifest_of
from ckptmove.live.tracing.causes.background import Background
from ckptmove.live.tracing.causes.verdicts import causes
from ckptmove.live.tracing.recording.operations import factory
from ckptmove.manifest.manifest import Manifest
from ckptmove.reports.doctor import SLOW, WRONG, Verdict
from ckptmove.reports.events import Happening, Operand, Site, Trace

HERE, THERE = "cpu", "cuda:0"


def held(**devices: str) -> Manifest:
    """Of a model with a tensor per name, each on a device."""
    model = nn.Module()
    for name in devices:
        model.register_parameter(name, nn.Parameter(torch.ones(2)))
    manifest = manifest_of(holdings(model), model)
    tensors = (each._replace(device=devices[each.name]) for each in manifest.tensors)
    return replace(manifest, path="Net", tensors=tuple(tensors))


def operand(name: str, device: str = HERE, held: str = "", **more: Any) -> Operand:
    return Operand(name, device, (2,), held, **more)


def happened(kind: str, phase: str, devices: str, **more: Any) -> Happening:
    site = Site(phase, "", f"aten.{kind}.default", "train.py:7")
    return Happening(kind, site, devices, 2, 8, (operand("x"),), **{"turns": 2, **more})


def trace(
    *happenings: Happening,
    operations: Mapping[str, int] | None = None,
    phases: Sequence[str] = ("forward", "backward", "optimizer"),
    steps: int = 2,
    error: str | None = None,
    operands: Sequence[Operand] = (),
) -> Trace:
    return Trace(
        device=THERE,
        operations={THERE: 60, HERE: 20} if operations is None else operations,
        phases={each: 9 for each in phases},
        sites=9,
        happenings=happenings,
        dropped=0,
        error=None if error is None else Site("", "", f"aten.{error}.default", "train.py:9"),
        calls=2,
        steps=steps,
        watched=steps,
        operands=tuple(operands),
    )


def found(manifest: Manifest, ran: Trace | None, **more: Any) -> list[Verdict]:
    return list(causes(THERE, manifest, trace=ran, **more))


MOVED = held(weight=THERE)
STRAY = happened("stray", "backward", HERE)
COPIED = happened("transfer", "forward", f"{THERE}→{HERE}", asked=True)
BACK = happened("transfer", "backward", f"{HERE}→{THERE}")


# -- the model -------------------------------------------------------------------------------------


def test_no_advice_takes_values_away() -> None:
    (whole,) = found(held(weight="meta", bias="meta"), None)
    (part,) = found(held(weight=THERE, bias="meta"), None)
    assert (whole.cause, part.cause) == ("no-values", "no-values")
    assert "to_empty" in whole.fix
    assert "to_empty" not in part.fix
    assert part.title == "bias: on the meta device, without values (8 bytes)"


def test_a_model_that_stayed_goes_by_its_variable() -> None:
    stayed = held(weight=HERE)
    (plain,) = found(stayed, None, known=Background(variable="model"))
    assert plain.title == "the model is on cpu: nothing moved Net to cuda:0"
    assert plain.fix.startswith('model.to("cuda:0") before')
    (named,) = found(stayed, None, known=Background(variable="D"))
    assert named.title == "the model D (Net) is on cpu: nothing moved it to cuda:0"
    assert named.fix.startswith('D.to("cuda:0") before')
    assert "ckptmove.move(D, optimizer" in named.fix


def test_a_model_that_stayed_while_most_runs_where_it_should_is_slow() -> None:
    stayed = held(weight=HERE)
    assert [each.severity for each in found(stayed, trace())] == [SLOW]
    assert [each.severity for each in found(stayed, trace(), failed="it")] == [WRONG]
    most = trace(operations={THERE: 20, HERE: 60})
    assert [each.severity for each in found(stayed, most)] == [WRONG]


@pytest.mark.parametrize("how", ["buffer", "parameter"])
def test_what_another_module_holds_is_told_with_that_module(how: str) -> None:
    weight = operand("weight", held=how, owner="criterion")
    failed = trace(error="nll_loss_forward", operands=[operand("out", THERE), weight])
    (verdict,) = found(MOVED, failed, failed="RuntimeError: …")
    assert verdict.title == "criterion was never moved: its weight is on cpu"
    assert verdict.fix.startswith('criterion.to("cuda:0")')
    assert verdict.cause == {"buffer": "criterion-never-moved"}.get(how, "model-never-moved")


def test_what_the_model_itself_holds_is_not_told_as_anothers() -> None:
    weight = operand("bias", held="parameter", owner="model")
    failed = trace(error="mm", operands=[operand("out", THERE), weight])
    told = found(held(weight=THERE, bias=HERE), failed, failed="RuntimeError: …")
    assert [each.cause for each in told] == ["partly-moved"]


# -- what ran elsewhere ----------------------------------------------------------------------------


def test_a_backward_pass_that_begins_elsewhere_is_slow() -> None:
    (verdict,) = found(MOVED, trace(STRAY, COPIED, BACK))
    assert (verdict.cause, verdict.severity) == ("computed-elsewhere", SLOW)
    assert "because the output of the model is copied there at train.py:7" in verdict.title


@pytest.mark.parametrize(
    ("ran", "why"),
    [
        ((replace(STRAY, devices="cuda:1"), COPIED, BACK), "devices of a kind share a model"),
        ((replace(STRAY, turns=1), COPIED, BACK), "a step of another model"),
        ((STRAY, replace(BACK, devices=f"{THERE}→{HERE}")), "it ends there, in a table, say"),
        ((STRAY,), "it never comes to the model"),
        ((STRAY, replace(BACK, turns=1)), "it came to the model once"),
    ],
)
def test_what_runs_elsewhere_by_right(ran: tuple[Happening, ...], why: str) -> None:
    assert found(MOVED, trace(*ran)) == [], why


def test_a_pass_without_an_optimizer_counts_as_one() -> None:
    """A loss is called as the model is, and counts."""
    ran = [replace(each, turns=1) for each in (STRAY, BACK)]
    (verdict,) = found(MOVED, trace(*ran, steps=0))
    assert verdict.cause == "computed-elsewhere"


def test_outputs_that_are_computed_elsewhere_alone() -> None:
    stray = happened("stray", "forward", HERE)
    there_too = trace(stray, phases=("forward",), steps=0)
    assert found(MOVED, there_too) == []
    never = trace(stray, phases=("forward",), steps=0, operations={HERE: 9})
    assert [each.cause for each in found(MOVED, never)] == ["computed-elsewhere"]


# -- what was made elsewhere -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "spelled"),
    [
        ("aten.lift_fresh.default", "torch.tensor"),
        ("aten.lift_fresh_copy.default", "torch.tensor"),
        ("aten.scalar_tensor.default", "torch.scalar_tensor"),
        ("aten.full_like.default", "torch.full_like"),
        ("aten.normal.float_float", "torch.normal"),
        ("aten.arange.start_step", "torch.arange"),
        ("aten.new_zeros.default", "x.new_zeros"),
        ("aten.empty_like.default", "torch.empty_like"),
        ("aten.fft_fftfreq.default", "torch.fft.fftfreq"),
        ("aten._sparse_coo_tensor_with_dims_and_tensors.default", "torch.sparse_coo_tensor"),
        ("aten.uniform_.default", "x.uniform_"),
        ("aten._to_copy.default", ""),
        ("aten._nobody_knows.default", ""),
        ("mine.frobnicate.default", ""),
    ],
)
def test_what_makes_a_tensor_is_spelled_as_in_python(op: str, spelled: str) -> None:
    assert factory(op) == spelled


def made(op: str, module: str = "", variable: str = "y") -> Operand:
    name = f"what {op} makes at train.py:3"
    return operand(name, held="made", module=module, variable=variable)


def of_failed(op: str, each: Operand) -> Verdict:
    ran = trace(error=op, operands=[operand("out", THERE), each])
    (verdict,) = found(MOVED, ran, failed="RuntimeError: …")
    return verdict


def test_what_is_made_elsewhere_is_told_with_its_maker() -> None:
    verdict = of_failed("mul", made("torch.ones"))
    assert verdict.title == "torch.ones at train.py:3 makes y on cpu"
    assert verdict.fix.endswith("torch.ones(…, device=x.device)")
    verdict = of_failed("mul", made("an operation"))
    assert verdict.title == "an operation at train.py:3 makes y on cpu"
    assert (
        verdict.fix
        == "create it on the device of the tensor that it is used with, or move it there: "
        "y = y.to(x.device)"
    )


@pytest.mark.parametrize("op", ["nll_loss_forward", "mse_loss", "binary_cross_entropy"])
def test_the_targets_of_a_loss_are_of_the_batch(op: str) -> None:
    """Whether a module computes the loss, which is called with them, or a function."""
    verdict = of_failed(op, made("torch.tensor"))
    assert verdict.cause == "batch-never-moved"
    assert verdict.title == "the batch is on cpu: y"
    assert verdict.evidence[0] == "what torch.tensor makes at train.py:3 is on cpu"
    within = of_failed(op, made("torch.tensor", module="head"))
    unnamed = of_failed(op, made("torch.tensor", variable=""))
    assert {within.cause, unnamed.cause} == {"made-elsewhere"}
