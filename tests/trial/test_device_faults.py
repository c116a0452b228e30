"""Programs with one planted fault, and right ones, as `scripts/doctor_score` scores them."""

from __future__ import annotations

import os

import pytest
import torch

from tests.devices.scores import Judged, held_out_judged, own_judged
from tests.making import held_out_faults, held_out_right
from tests.making.device_faults import FAULTS
from tests.making.right_programs import RIGHT

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there"),
]

#: What is known not to be found, or not with the names and lines that it should have.
NOT_FOUND: set[str] = set()


def check(found: list[Judged]) -> None:
    assert [each for each in found if not each.wrong and each.word != "clean"] == []
    missed = {each.name for each in found if each.wrong and each.word != "found"}
    assert missed == {each.name for each in found} & NOT_FOUND
    for each in found:
        shown = {**each.told, "facts": None}  # which here are of a process that has the device
        assert "privateuse" not in str(shown).lower(), each.name


def test_some_programs() -> None:
    check(list(own_judged(("data_of_parameters", "autocast", "attention_mask"))))


@pytest.mark.slow
def test_every_program() -> None:
    found = list(own_judged())
    assert len(found) == 2 * len(FAULTS) + len(RIGHT)
    check(found)


@pytest.mark.slow
def test_every_program_that_was_held_out() -> None:
    found = list(held_out_judged())
    assert len(found) == 2 * len(held_out_faults.FAULTS) + len(held_out_right.RIGHT)
    check(found)
