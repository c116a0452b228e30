"""deepspeed: a folder that DeepSpeed wrote with ZeRO 1, 2 or 3: `engine.save_checkpoint`.

    latest                  the name of the folder of the newest checkpoint
    global_step500/         a checkpoint: a file of each rank, see `rank_files`; those of stages of
                            a pipeline are joined, see `pipeline`

The weights, the optimizer and everything that the user saved are read in the form of a single file
that was saved without ZeRO: `module`, by name; `optimizer`, with a number and a state for each
parameter as in torch.optim; and the rest. The trained weights are those of the optimizer, in
float32; the model's own weights are less exact copies of these (`ReadSession.weights`). The
partitions belong to the ranks and are not kept: see `zero`.

Source: deepspeed/runtime/engine.py, `save_checkpoint` (DeepSpeed 0.8 to 0.19).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ....display.phrases import join_names, plural
from ....errors import InputError, UnsupportedError
from ....sources.place import EntryKind
from ...base import Format
from ...checkpoint import Carries, Checkpoint
from ...folders.layouts import before_convert, is_several
from ...folders.parts import ALL_RANKS, IncompleteError
from ...folders.weight_names import weights_among
from ...probe import Probe
from ...torch.zip import TorchZipContainer
from ..saved_file import SavedFile, check_names
from .pipeline import PipelineStage, join_stages, module_of
from .rank_files import RankFiles
from .zero import Zero, world_of
from .zero_container import ZeroContainer

_LATEST = "latest", "latest_universal"
_SCRIPT = "zero_to_fp32.py"
#: Files beside the folders of checkpoints that refer to them or read them.
BESIDE = (*_LATEST, _SCRIPT, "zero_to_torch.py")
_STEP = re.compile(r"global_step\d+(_universal)?")
_LONGEST_TAG = 255
_MOST_NAMED = 5


class DeepSpeed(Format):
    """The format of DeepSpeed checkpoints that consist of several files."""

    name = "deepspeed"
    summary = "DeepSpeed with ZeRO 1, 2 or 3: `engine.save_checkpoint`, transformers, accelerate"
    refused = (
        "folders that lack files of ranks; tensor parallelism, experts, and weights that stages of "
        "a pipeline share, since only the model's code knows how to merge them"
    )
    carries = Carries(False, True, False, objects=True, dtypes="all of torch")
    in_parts = True

    def sniff(self, probe: Probe) -> bool:
        """Whether a folder has files of ranks, or is a run with checkpoints in subfolders."""
        if not probe.is_folder:
            return False
        ranks = RankFiles.among(probe.entries)
        return ranks.are_there or bool(_tags(probe))

    def read(self, probe: Probe) -> Checkpoint:
        """Read the files of all ranks, or those of the newest checkpoint of a run."""
        named = RankFiles.among(probe.entries)
        if not named.are_there:
            return _read_run(probe)
        files = checked_files(probe)
        tell_others(probe, files.names)
        opened = {name: open_file(probe, name, n) for n, name in enumerate(files.names, 1)}
        check_names(opened.values())
        stages = [_stage(files, opened, number) for number in sorted(files.parts)]
        if files.layers:
            layers = {number: opened[name] for number, name in files.layers.items()}
            trained, module = join_stages(stages, layers), module_of(layers)
        else:
            trained, module = Zero(*stages[0]), None
        tell_devices(probe, opened.values())
        model = [file for stage in stages for file in stage.model]
        container = ZeroContainer(probe, opened.values(), model, trained, module)
        return container.checkpoint(self.name, self.carries)


def _stage(files: RankFiles, opened: Mapping[str, SavedFile], number: int) -> PipelineStage:
    """The files of one stage of a pipeline, or of the whole model."""
    part = files.parts[number]
    ranks = [opened[part.optimizer[rank]] for rank in sorted(part.optimizer)]
    if not ranks:
        raise InputError(f"has no states of the optimizer for mp_rank_{number:02}", hint=ALL_RANKS)
    world = world_of(ranks[0])
    files.check_ranks(world, number)
    for rank in ranks:
        if world_of(rank) != world:
            raise rank.malformed_error(f"the number of ranks (other files say {world:,}): it")
    return PipelineStage([opened[part.model[rank]] for rank in sorted(part.model)], ranks)


def tell_devices(probe: Probe, files: Iterable[SavedFile]) -> None:
    """Note the device tags of the files, which the assembled tensors can't have."""
    stored = (each for file in files for each in file.container.storages.values())
    devices = sorted({str(each.location) for each in stored} - {"cpu"})
    if devices:
        told = join_names(devices, _MOST_NAMED)
        probe.note(
            f"its files are tagged {told}; the tensors assembled from them are shown without "
            "devices"
        )


def tell_others(probe: Probe, known: Iterable[str]) -> None:
    """Note the files beside a checkpoint that are not part of it."""
    others = sorted(probe.entries.keys() - {*known, *BESIDE})
    if others:
        probe.note(f"{join_names(others, _MOST_NAMED)} in it was not looked at")
        probe.leave(others)


def checked_files(probe: Probe) -> RankFiles:
    """The files of one checkpoint; raises InputError if some are known to be missing."""
    files = RankFiles.among(probe.entries)
    try:
        files.check_kind()
        try:
            files.check_ranks(max((*files.optimizer, *files.model), default=0) + 1)
        except IncompleteError:
            if files.optimizer:  # it gives the number of ranks
                files.check_ranks(_world(probe, files))
            raise
    except InputError as error:
        error.about(probe.path)
        raise
    return files


def check_complete(probe: Probe) -> None:
    """Raises InputError if a folder lacks files of ranks, or has files of two saves.

    Kinds of files that are not merged are not checked.
    """
    files = RankFiles.among(probe.entries)
    if not files.optimizer or files.layers or files.experts or len(files.parts) > 1:
        return
    try:
        checked_files(probe)
        files.check_ranks(_world(probe, files))
    except InputError as error:
        error.about(probe.path)
        raise


def _world(probe: Probe, files: RankFiles) -> int:
    """The number of ranks that saved, from the file of the first one."""
    return world_of(open_file(probe, files.optimizer[min(files.optimizer)], 1))


def _tags(probe: Probe) -> list[str]:
    """The folders of the checkpoints of a run, if the folder is that of a run."""
    kinds = {name: each.kind for name, each in probe.entries.items()}
    if is_several(kinds) or weights_among(kinds):  # a trainer saved more files beside them
        return []
    folders = [name for name, kind in kinds.items() if kind is EntryKind.FOLDER]
    steps = [name for name in folders if _STEP.fullmatch(name)]
    told = any(kinds.get(name) is EntryKind.FILE for name in _LATEST)
    named = told and bool(steps or _SCRIPT in kinds)
    return folders if named else steps


def _read_run(probe: Probe) -> Checkpoint:
    """Read the newest checkpoint of a run."""
    tags = _tags(probe)
    tag = tags[0]
    latest = next((name for name in _LATEST if name in probe.entries), None)
    if latest is not None:
        source = probe.open(latest).file
        told = source.read(0, min(source.nbytes, _LONGEST_TAG + 1)).decode("utf-8", "replace")
        tag = told.strip()
        if tag not in tags:
            raise InputError(
                f"its file {latest!r} names {tag!r:.100}, which is not a folder in it",
                path=probe.path,
            )
    elif len(tags) > 1:
        raise UnsupportedError(
            f"has {plural(len(tags), 'checkpoint')} and no file 'latest': "
            f"{join_names(tags, _MOST_NAMED)}",
            path=probe.path,
            hint="give one of them",
        )
    others = [name for name in tags if name != tag]
    if others:
        named = join_names(others, _MOST_NAMED)
        probe.note(f"only {tag} was looked at, the newest in it; not {named}")
    tell_others(probe, tags)
    found = probe.open_folder(tag)
    if not any(before_convert(name).endswith("_states.pt") for name in found.entries):
        raise UnsupportedError(
            f"is a directory of DeepSpeed, and its folder {tag} holds no checkpoint",
            path=probe.path,
        )
    read = probe.read_from(found)
    # if one file holds everything
    read.folder = read.folder and read.folder._replace(path=probe.path)
    return read


def open_file(probe: Probe, name: str, number: int, base: str = "") -> SavedFile:
    """Open a file in a folder; `number` is the number of its source among all.

    `base`: the prefix of storage ids, before the name of the file.
    """
    probe.session.begin_file(base + name)
    found = probe.open(name)
    container = probe.read_from(found).container
    if not isinstance(container, TorchZipContainer):
        raise UnsupportedError("is not a file that torch.save wrote as a zip", path=found.path)
    return SavedFile(name, number, found.file, container)
