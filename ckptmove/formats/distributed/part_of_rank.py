"""Refuse files of ranks that hold only some of the parts of their tensors."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from ...display.phrases import join_names
from ...graph.traversal import nodes_of
from ...sources.source import Source
from ...torch_pickle.streams import Container
from ..folders.parts import ALL_RANKS, IncompleteError
from ..torch.zip import TorchZipContainer
from .divided_tensor import DividedTensor, Placement, divided_tensor
from .rank_groups import rank_of
from .saved_file import SavedFile

_MOST_NAMED = 5


def check_has_all_parts(containers: Iterable[Container], hint: str = ALL_RANKS) -> None:
    """Raises IncompleteError if tensors of these files, of a rank each, have parts elsewhere.

    Copies of a part count as other parts: this finds no missing rank of a mesh that replicates.
    """
    files = list(filter(None, map(_saved_file, containers)))
    for row in zip(*map(_divided, files), strict=False):
        held = sum(map(_held, files, row))
        if held < prod(row[0].shape):
            raise _missing(files, row[0], hint)


def _saved_file(container: Container) -> SavedFile | None:
    source, roots = container.source, container.roots
    if isinstance(container, TorchZipContainer) and isinstance(source, Source) and len(roots) == 1:
        return SavedFile(source.path, 0, source, container)
    return None


def _divided(file: SavedFile) -> list[DividedTensor]:
    return list(filter(None, map(divided_tensor, nodes_of(file.top))))


def _held(file: SavedFile, tensor: DividedTensor) -> int:
    """The number of elements that a file has of a tensor."""
    return sum(prod(each.shape) for each in map(file.tensor, tensor.local) if each is not None)


def _missing(files: list[SavedFile], tensor: DividedTensor, hint: str) -> IncompleteError:
    own = {rank for rank in (rank_of(file.name) for file in files) if rank is not None}
    others = sorted(Placement(0, files[0].numbers).ranks_of(tensor) - own)
    ranks = join_names([f"{rank:,}" for rank in others], _MOST_NAMED)
    said = (
        f"the parts of rank {ranks} are missing" if own else f"has only one part of ranks {ranks}"
    )
    return IncompleteError(said, path=files[0].source.path, hint=hint)
