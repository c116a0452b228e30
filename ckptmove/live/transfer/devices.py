"""Check that a device exists, and give it the name that tensors on it have."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import get_worker_info

from ...device import parse
from ...errors import DeviceError
from ...phrases import first_line

_LONGEST_SAID = 120  # characters of why torch can't use a device


def reachable(device: Any) -> torch.device:
    """The device that a user means, with its index, as tensors there name it.

    Raises:
        DeviceError: there is none such, or torch can't use it here.
    """
    is_number = isinstance(device, int) and not isinstance(device, bool)
    if not is_number and not isinstance(device, torch.device):
        device = _spelled(device)
    try:
        return torch.empty(0, device=device).device
    except Exception as error:  # a type of its own for each kind of device
        why = first_line(error, _LONGEST_SAID).partition(". ")[0].rstrip(".")
        hint = "run `ckptmove doctor` to see which devices work, and why"
        if get_worker_info() is not None:
            hint = "this is a worker process of a DataLoader; move the batches in the training loop"
        raise DeviceError(f"'{device}' can't be used here: {why}", hint=hint) from error


def _spelled(device: Any) -> torch.device:
    if isinstance(device, str):
        try:
            return torch.device(device)
        except RuntimeError:
            pass
    tag = parse(device)  # says what is wrong
    raise DeviceError(f"this torch has no device '{tag}'", hint="import the package that adds it")
