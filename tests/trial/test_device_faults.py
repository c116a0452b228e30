"""Programs with one planted fault, and right ones, as `scripts/doctor_score` scores them."""

from __future__ import annotations

import os

import pytest
import torch

from tests.devices.scores import SETS, Judged, set_judged

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there"),
]

#: What is known not to be found, or not with the names and lines that it should have.
NOT_FOUND: set[str] = set()


SOME = "averages_in_a_dict", "features_of_a_hook", "device_of_a_config", "devices_compared"

LATER = "trainer_default_device", "generator_of_a_split", "lightning_tensor_attribute"
LIBRARIES = (
    "skorch_without_a_device",
    "ignite_evaluator_without_a_device",
    "networks_of_an_experiment",
)


def check(found: list[Judged]) -> None:
    assert [each for each in found if not each.wrong and each.word != "clean"] == []
    missed = {each.name for each in found if each.wrong and each.word != "found"}
    assert missed == {each.name for each in found} & NOT_FOUND
    for each in found:
        shown = {**each.told, "facts": None}  # which here are of a process that has the device
        assert "privateuse" not in str(shown).lower(), each.name


def test_some_programs() -> None:
    check(list(set_judged("", ("data_of_parameters", "autocast", "attention_mask"))))
    check(list(set_judged("forum", SOME)))
    check(list(set_judged("later", LATER)))
    check(list(set_judged("libraries", LIBRARIES)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETS)
def test_every_program(kind: str) -> None:
    found = list(set_judged(kind))
    assert len(found) == 2 * len(SETS[kind].faults) + len(SETS[kind].right)
    check(found)
