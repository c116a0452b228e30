"""A callback for the `Trainer` of transformers: saves each checkpoint also as one safetensors file.

    trainer = Trainer(..., callbacks=[SafetensorsCallback()])
    trainer.train(resume_from_checkpoint=folder_of("run/checkpoint-500.safetensors"))

The Trainer writes `checkpoint-500/` and reads such folders alone, so the callback packs the folder
when it is complete: weights, optimizer, scheduler, RNG states and the state of the trainer, in a
file that holds no devices. `folder_of` unpacks it into the same files. (Since `optimizer.pt` is
unpickled by torch, only by `weights_only`, nothing that was unknown comes back as a pickle.)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..api.convert import convert
from ..errors import StrPath


class SafetensorsCallback(TrainerCallback):
    """Writes `checkpoint-500.safetensors` beside `checkpoint-500/` when that is complete."""

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Pack the newest checkpoint; an older file is replaced. Raises as `ckptmove.convert`."""
        if not state.is_world_process_zero:
            return
        folder = Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if folder.is_dir():  # missing if only the model is saved
            convert(folder, f"{folder}.safetensors", force=True)


def folder_of(path: StrPath) -> str:
    """Return the folder that this file was made from; unpack it beside the file if it is missing.

    Raises as `ckptmove.convert`.
    """
    folder = os.fspath(path).removesuffix(".safetensors")
    if not Path(folder).is_dir():
        convert(path, f"{folder}/")
    return folder
