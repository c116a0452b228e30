"""Read everything in a folder of any kind."""

from __future__ import annotations

from ..distributed.dcp.folder import Dcp, no_devices
from ..distributed.dcp.hf_shards import HuggingFaceShards
from ..distributed.deepspeed.folder import check_complete
from ..distributed.rank_groups import divided_folders
from ..probe import Probe
from .model_folder import ModelFolder
from .training_folder import FolderCheckpoint, TrainingFolder, read_folder


def read_whole(probe: Probe, *, by_rank: bool) -> FolderCheckpoint:
    """Read a folder; parameters and errors are those of `formats.open_whole_folder`."""
    if Dcp().sniff(probe) or HuggingFaceShards().sniff(probe):
        raise no_devices(probe.path)
    check_complete(probe)
    format = TrainingFolder()
    bare = not format.sniff(probe) and ModelFolder().sniff(probe)
    if by_rank:
        for name in sorted(divided_folders(probe.names_below())):
            check_complete(probe.open_folder(name))
    return read_folder(probe, format, bare=bare, by_rank=by_rank)
