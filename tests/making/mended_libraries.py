"""A plugin of pytest for `scripts/libraries`: libraries that would fail to be imported, mended.

- torchvision, whose build on the index is for CUDA, beside a torch for the CPU: it cannot load its
  operators, and then fails to describe two of them. They are declared here, without code. Nothing
  that a checkpoint is made with calls them.
- fairseq, last released for Python 3.10: since 3.11, no default of a dataclass may be an object
  without a hash. Its configurations get one.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch

_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def _declare_operators() -> None:
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        for name in ("nms", "qnms"):
            _OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")


def _hash_configurations() -> None:
    inside: Any = dataclasses
    process = inside._process_class

    def hashable(cls: type, *options: bool) -> type:
        init, repr, eq, order, has_hash, frozen, *rest = options
        if cls.__module__.startswith("fairseq.") and not frozen:
            has_hash = True
        made: type = process(cls, init, repr, eq, order, has_hash, frozen, *rest)
        return made

    inside._process_class = hashable


_declare_operators()
_hash_configurations()
