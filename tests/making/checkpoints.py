"""Makers of real checkpoint files: `torch.save` of real objects, as real machines wrote them.

`MAKERS` has every object worth saving by name; `save_tagged` saves one as a machine with another
device would have, `kept_on_cpu` says which of its storages stay on the CPU there.
"""

from __future__ import annotations

from tests.making import exotic, modules, objects, subclasses, tensors, training
from tests.making.frameworks import hf_trainer_folder, lightning_checkpoint
from tests.making.registry import MAKERS
from tests.making.saving import (
    keep_none,
    kept_on_cpu,
    rezip,
    save,
    save_by_cpp,
    save_tagged,
    sparse_zip64,
    squeeze,
    tagging,
)

ROOMS = (exotic, modules, objects, subclasses, tensors, training)  # each fills MAKERS

# What fake tensors can't be made of when they are labelled cuda:0 on a build without CUDA.
UNLABELLED = {"generator", "nested_jagged", "nested_strided", "tensor_subclass"} | {
    name for name in MAKERS if name.startswith(("quantized_", "sparse_bs", "sparse_cs"))
}

__all__ = [
    "MAKERS",
    "UNLABELLED",
    "hf_trainer_folder",
    "keep_none",
    "kept_on_cpu",
    "lightning_checkpoint",
    "rezip",
    "save",
    "save_by_cpp",
    "save_tagged",
    "sparse_zip64",
    "squeeze",
    "tagging",
]
