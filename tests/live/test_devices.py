"""What a user calls a device, and whether it is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptmove import DeviceError
from ckptmove.live.transfer.devices import reachable


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_the_cpu_is_there(device: Any) -> None:
    assert reachable(device) == torch.device("cpu")


def test_meta_is_there() -> None:
    assert reachable("meta") == torch.device("meta")


@pytest.mark.parametrize("device", ["hpu", "cuda:99", "vulkan", "fpga", 99, -1, 10**10])
def test_what_is_not_there_is_said_in_a_line(device: Any) -> None:
    with pytest.raises(DeviceError, match="can't be used here: ") as caught:
        reachable(device)
    said = str(caught.value)
    assert said.startswith(f"'{device}'")
    assert len(said) < 180
    assert "\n" not in said
    assert "Facebook" not in said
    assert "doctor" in (caught.value.hint or "")


@pytest.mark.parametrize("device", [True, 1.5, None, [], b"cpu", "", "gpu", "CPU", "cpu ", {}])
def test_what_is_no_device(device: Any) -> None:
    with pytest.raises(DeviceError) as caught:
        reachable(device)
    assert len(str(caught.value)) < 180
