"""The second device, there once this is imported: in the process that its tests are forks of."""

from __future__ import annotations

import os

from tests.devices.second_device import install

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of accelerators torch takes one
install()
