"""Programs with one planted fault, and right ones, as `scripts/doctor_score` scores them."""

from __future__ import annotations

import os

import pytest
import torch

from tests.conftest import ALL
from tests.devices.scores import SETS, Judged, set_judged

pytestmark = [
    pytest.mark.usefixtures("warm"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there"),
]

#: What is known not to be found, or not with the names and lines that it should have.
NOT_FOUND: set[str] = set()


#: What `scripts/test` runs of a set; of those that are not named, nothing.
SOME = {
    "": ("data_of_parameters", "attention_mask"),
    "forum": ("averages_in_a_dict", "devices_compared"),
    "later": ("generator_of_a_split",),
    "libraries": ("ignite_evaluator_without_a_device",),
    "answers": ("flag_that_is_not_given",),
    "outsider": ("validate_moves_model",),
    "strangers": ("except_swallows_device", "model_put_on_the_cpu", "pruning_mask"),
}
#: What `scripts/test --all` runs of a set that takes minutes: what showed most of what was lacking.
MOST = {
    "outsider": (
        *("adversarial_delta", "clip_temperature", "config_dataclass", "flow_prior", "meta_sgd"),
        *("device_string_compare", "gpu_flag_misspelt", "validate_moves_model", "resume_run"),
        *("vq_codebook_reset", "stateful_rnn", "partial_weighted_loss", "sac_alpha"),
    ),
}


def check(found: list[Judged]) -> None:
    assert [each for each in found if not each.wrong and each.word != "clean"] == []
    missed = {each.name for each in found if each.wrong and each.word != "found"}
    assert missed == {each.name for each in found} & NOT_FOUND
    for each in found:
        shown = {**each.told, "facts": None}  # which here are of a process that has the device
        assert "privateuse" not in str(shown).lower(), each.name


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=() if each in SOME else pytest.mark.slow) for each in SETS]
)
def test_programs(kind: str) -> None:
    only = (MOST if ALL else SOME).get(kind)
    if only is not None:
        check(list(set_judged(kind, only)))
        return
    found = list(set_judged(kind))
    assert len(found) == 2 * len(SETS[kind].faults) + len(SETS[kind].right)
    check(found)
