"""Folders of distributed checkpoints, written by torch's own writers in this process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

#: A part of a tensor: where it starts, and how large it is, in each dimension.
Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes_of(shape: Sequence[int], random: Random, most: int = 12) -> list[Box]:
    """Boxes that tile a shape, cut at random, in no order."""
    boxes: list[Box] = [((0,) * len(shape), tuple(shape))]
    for _ in range(random.randrange(most)):
        start, size = boxes.pop(random.randrange(len(boxes)))
        wide = [n for n, count in enumerate(size) if count > 1]
        if not wide:
            boxes.append((start, size))
            continue
        n = random.choice(wide)
        cut = random.randrange(1, size[n])
        rest = size[n] - cut
        boxes.append((start, (*size[:n], cut, *size[n + 1 :])))
        boxes.append(
            ((*start[:n], start[n] + cut, *start[n + 1 :]), (*size[:n], rest, *size[n + 1 :]))
        )
    random.shuffle(boxes)
    return boxes


class ChunkPlanner(DefaultSavePlanner):
    """Saves each tensor in the given chunks, as its ranks would."""

    def __init__(
        self, boxes: Mapping[str, Sequence[Box]], *, size: Any = torch.Size, **options: Any
    ) -> None:
        """`size` makes what says where a chunk lies; Megatron-FSDP has tuples or lists."""
        super().__init__(**options)
        self.boxes, self.size = boxes, size

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            if item.tensor_data is None or item.index.fqn not in self.boxes:
                items.append(item)
                continue
            for start, size in self.boxes[item.index.fqn]:
                chunk = ChunkStorageMetadata(self.size(start), self.size(size))
                data = replace(item.tensor_data, chunk=chunk)
                index = MetadataIndex(item.index.fqn, torch.Size(start))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        fqn = write_item.index.fqn
        if fqn not in self.boxes or write_item.tensor_data is None:
            return super().resolve_data(write_item)
        found = self.state_dict[fqn]
        chunk = write_item.tensor_data.chunk
        slices = tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.sizes, strict=True))
        return found[slices].detach()


def save_dcp(
    folder: Path,
    state: dict[str, Any],
    boxes: Mapping[str, Sequence[Box]] | None = None,
    *,
    files: int = 1,
    **options: Any,
) -> Path:
    """Save with torch.distributed.checkpoint; `boxes` are the chunks of tensors, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(
            state,
            storage_writer=FileSystemWriter(folder, thread_count=files),
            planner=ChunkPlanner(boxes or {}, **options),
            no_dist=True,
        )
    return folder


def save_hf_rank(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    """Save with the writer for Hugging Face, as a rank does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(state, storage_writer=writer, no_dist=True)
    return folder
