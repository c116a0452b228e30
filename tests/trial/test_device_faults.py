"""Programs with one planted fault, and right ones, as `scripts/doctor_score` scores them."""

from __future__ import annotations

import os

import pytest
import torch

from tests.devices.scores import Judged, faults_judged
from tests.making.device_faults import FAULTS
from tests.making.right_programs import RIGHT

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there"),
]

#: What is known not to be found, or not with the names and lines that it should have.
NOT_FOUND = {
    *("asarray_of_losses", "averages_on_the_host", "cuda_in_workers", "numpy_of_outputs"),
    *("default_device_and_shuffling", "generator_of_the_host", "lengths_of_sequences"),
    *("stack_of_numbers", "table_on_the_host", "clamp_by_tensors", "condition_inverted"),
    *("constant_of_a_function", "device_of_an_argument", "put_of_device_values"),
    *("weights_of_the_loss", "encoder_on_the_host", "evaluation_at_the_end"),
    *("parameter_to_device", "pinned_on_the_device"),
}


def check(found: list[Judged]) -> None:
    assert [each for each in found if not each.wrong and each.word != "clean"] == []
    missed = {each.name for each in found if each.wrong and each.word != "found"}
    assert missed == {each.name for each in found} & NOT_FOUND
    for each in found:
        shown = {**each.told, "facts": None}  # which here are of a process that has the device
        assert "privateuse" not in str(shown).lower(), each.name


def test_some_programs() -> None:
    check(list(faults_judged(("data_of_parameters", "autocast", "attention_mask"))))


@pytest.mark.slow
def test_every_program() -> None:
    found = list(faults_judged())
    assert len(found) == 2 * len(FAULTS) + len(RIGHT)
    check(found)
