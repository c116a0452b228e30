"""Read everything in a folder of any kind."""

from __future__ import annotations

from ..distributed.dcp.folder import Dcp, no_devices
from ..distributed.dcp.hf_shards import HuggingFaceShards
from ..distributed.deepspeed.folder import check_complete
from ..distributed.part_of_rank import check_has_all_parts
from ..distributed.rank_groups import divided_folders, rank_groups
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
    folder = read_folder(probe, format, bare=bare, by_rank=by_rank)
    if folder.class_of_parts is not None:
        containers = {part.name: part.checkpoint.container for part in folder.parts}
        groups, grouped = rank_groups(containers, alone=True), set[str]()
        for group in groups:
            grouped.update(group.files.values())
            if group.world is None:  # else the names tell
                check_has_all_parts(containers[name] for name in group.files.values())
        rest = (each.checkpoint for each in folder.parts if each.name not in grouped)
        if all(each.class_of_parts is None for each in rest):
            folder.class_of_parts = None  # the parts are all there
    return folder
