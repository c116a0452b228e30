"""A plugin for Lightning's `Trainer`: checkpoints are safetensors, and resume bit for bit.

    trainer = lightning.Trainer(plugins=[SafetensorsIO()])

The whole checkpoint is in one file: weights, optimizers, schedulers, loops, callbacks. It holds no
devices; `trainer.fit(model, ckpt_path=...)` resumes on whatever device the trainer uses. The files
keep the names that Lightning gives them (`last.ckpt`). What a plugin does: `CheckpointIO` of
lightning.fabric.plugins.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO

from ..api.load import load
from ..api.save import save
from ..sources import place_of


class SafetensorsIO(TorchCheckpointIO):
    """Saves and loads the trainer's checkpoints; Lightning itself removes old ones."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a checkpoint, which appears complete and verified, or not at all.

        Args:
            checkpoint: the trainer's checkpoint.
            path: the file, here or in a store; an older one is replaced.
            storage_options: not supported, as in Lightning's own plugin.

        Raises:
            TypeError: there are `storage_options`.
            CkptmoveError: as `ckptmove.save`.
        """
        if storage_options is not None:
            raise TypeError("SafetensorsIO takes no storage_options")
        name = os.fspath(path)
        if place_of(name).opens_by_path:  # a store needs no folders
            Path(name).parent.mkdir(parents=True, exist_ok=True)
        save(checkpoint, name, format="safetensors", force=True)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of any format that ckptmove reads; nothing in it is executed.

        Args:
            path: the file; files that Lightning itself wrote are read, too.
            map_location: a device, as for `torch.load`; anything else gives tensors on the CPU,
                from which the trainer takes them to its devices.
            weights_only: of no effect, as objects of unknown classes are never made.

        Raises:
            CkptmoveError: as `ckptmove.load`.
        """
        del weights_only
        device = "cpu" if map_location is None or callable(map_location) else map_location
        loaded: dict[str, Any] = load(os.fspath(path), device)
        return loaded
