"""Relocate a folder: each checkpoint in it by its own format, all other files copied."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ... import formats
from ...display.phrases import few, quote
from ...errors import CkptmoveError, InputError, RefusedError, WriteError
from ...formats.folders.parts import ALL_RANKS
from ...formats.folders.run_folders import several_checkpoints
from ...formats.folders.training_folder import FolderCheckpoint, FolderPart
from ...formats.relocation_check import check_container
from ...manifest.paths import Path
from ...placement.place import Moves
from ...placement.place import place as place_tensors
from ...placement.rules import Rules
from ...plans.plan import Plan
from ...reports.relocate import RelocatedFile
from ...sources import place_of
from ...sources.file import File
from ...sources.place import folders_above
from ...sources.source import Source
from ...torch_pickle.streams import Container, LocationEdits
from ...writing import destination_of
from ...writing.in_place.change import InPlaceFolder, check_folder_in_place
from ...writing.verify import Progress
from .files import all_files, check_apart

_TOLD = (
    "store",
    "upload",
    "fetch",
    "read",
    "kernel",
    "reflink",
)  # ways of copying bytes, the most important first


class PartFile(NamedTuple):
    """A file of a folder that stores devices of tensors, and how it is written."""

    name: str  #: relative to the folder
    source: Source
    container: Container
    plan: Plan

    def check(self, written: Source, spelling: LocationEdits, moves: Moves) -> None:
        """Read the written file back and compare it with the plan."""
        try:
            with written:
                after = formats.read(written).container
                check_container(self.container, after, spelling, moves)
        except InputError as error:
            message = f"what was written can't be read: {error}"
            raise WriteError(message, path=written.path) from error
        except WriteError as error:
            error.about(written.path)
            raise


def _stores_devices(before: FolderCheckpoint, part: FolderPart) -> bool:
    """Whether a file of this part stores the devices of its tensors."""
    carries = part.checkpoint.carries.devices
    return carries and any(each.stores_devices for _, each in before.containers_of(part))


class FolderChange:
    """A planned change of a folder, made in a new folder or in place."""

    is_folder = True

    def __init__(
        self, before: FolderCheckpoint, rules: Rules, *, force: bool, follow_links: bool
    ) -> None:
        """Plan it. Raises as `place`; InputError for files that a relocated folder can't have."""
        self.before, self.force = before, force
        self.path = before.container.source.path
        if before.own:
            raise several_checkpoints(before.own, place_of(self.path))
        gone = [each for each in before.missing if each.is_of_rank]
        if gone:
            told = few([each.name for each in gone])
            message = f"is incomplete, missing: {told} ({gone[0].because})"
            raise InputError(message, path=self.path, hint=ALL_RANKS)
        manifest = before.manifest
        self._keys = {part.keys: _stores_devices(before, part) for part in before.parts}
        fixed = {each.path: each.device for each in manifest.tensors if not self._moves(each.path)}
        self.moves = place_tensors(manifest, rules._replace(fixed=fixed))
        self._drop_fixed()
        self.spelling = before.spelling(self.moves)
        self.files = {each.name: each for each in self._plan_files()}
        notes = list[str]()
        everything = all_files(self.path, notes, follow_links=follow_links)
        #: The files that are copied unchanged.
        self.companions = [each for name, each in everything.items() if name not in self.files]
        self.notes: Sequence[str] = notes

    def _moves(self, path: Path) -> bool:
        """Whether the value at this path is in a part that stores devices."""
        for n in range(len(path), -1, -1):
            if path[:n] in self._keys:
                return self._keys[path[:n]]
        return True

    def _drop_fixed(self) -> None:
        """Drop all moves in files that store no devices, also of storages without a tensor."""
        for part in self.before.parts:
            if not self._keys[part.keys]:
                for each in part.checkpoint.container.everything():
                    for key in each.storages:
                        self.moves.storages.pop(key, None)
        named = self.before.manifest.values_naming_devices
        for n in [n for n in self.moves.values if not self._moves(named[n].path)]:
            del self.moves.values[n]
        kept = (n for n in self.moves.rewritable if self._moves(named[n].path))
        self.moves.rewritable[:] = list(kept)

    def _plan_files(self) -> Iterator[PartFile]:
        start = os.path.join(self.path, "")
        for part in self.before.parts:
            for number, container in self.before.containers_of(part):
                if not (self._keys[part.keys] and container.stores_devices):
                    continue
                source = self.before.files[number]
                try:
                    plan = container.plan(self.spelling)
                except CkptmoveError as error:
                    error.about(source.path)
                    raise
                yield PartFile(source.path.removeprefix(start), source, container, plan)

    @property
    def method(self) -> str:
        """How the files are written, in one word."""
        methods = {each.plan.method for each in self.files.values()}
        return next((each for each in ("relay", "patch") if each in methods), "clone")

    @property
    def nbytes(self) -> int:
        """The size of the folder."""
        companions = sum(each.nbytes for each in self.companions if not each.is_folder)
        return companions + sum(each.source.nbytes for each in self.files.values())

    @property
    def changed_files(self) -> dict[str, tuple[Source, Plan]]:
        """The files whose bytes change."""
        return {
            name: (each.source, each.plan)
            for name, each in self.files.items()
            if each.plan.method != "clone"
        }

    def report(self, *, in_place: bool) -> tuple[RelocatedFile, ...]:
        """Report what happens to each file."""
        how = "none" if in_place else "clone"
        unread = {each.name for each in self.before.unread}
        found = [
            RelocatedFile(
                *(each.name, how, each.nbytes, False),
                is_unread=not unread.isdisjoint((each.name, *folders_above(each.name))),
            )
            for each in self.companions
            if not each.is_folder
        ]
        for each in self.files.values():
            method = each.plan.method
            if in_place:
                method = "none" if method == "clone" else "in-place"
            found.append(RelocatedFile(each.name, method, each.plan.nbytes, True))
        return tuple(sorted(found))

    # -- in a new folder -----------------------------------------------------------------------

    def check(self, target: str) -> None:
        """Raises RefusedError where a new folder would be refused."""
        destination = destination_of(target)
        check_apart(self.path, target)
        destination.check_folder(self.before.sources, force=self.force)
        self._check_replaced(target)
        plans = [each.plan for each in self.files.values()]
        besides = sum(each.nbytes for each in self.companions)
        destination.check_room(plans, [each.source for each in self.files.values()], besides)

    def _check_replaced(self, target: str) -> None:
        again = {*self.files, *(each.name for each in self.companions)}
        gone = [name for name in destination_of(target).names_below() if name not in again]
        if gone:
            raise RefusedError(
                f"{quote(gone)} in it would be gone",
                path=target,
                hint="remove it first, or name another folder",
            )

    def write(self, target: str, progress: Progress | None) -> tuple[str | None, int]:
        """Write, verify and commit; return how the bytes were copied, and how many."""
        self.check(target)
        how = set[str]()
        sources = self.before.sources
        with destination_of(target).new_folder(sources, force=self.force, like=self.path) as made:
            for each in self.files.values():
                with made.file(each.name, [each.source]) as file:
                    how.add(file.write(each.plan, progress))
                    each.check(file.open_written(), self.spelling, self.moves)
            for companion in self.companions:
                companion.copy_into(made, progress)
            self.before.check_unchanged()
            made.commit()
        return next((each for each in _TOLD if each in how), None), self.new_nbytes

    @property
    def new_nbytes(self) -> int:
        """The size of the new folder."""
        companions = sum(each.nbytes for each in self.companions if not each.is_folder)
        return companions + sum(each.plan.nbytes for each in self.files.values())

    # -- in place ------------------------------------------------------------------------------

    def _local(self) -> Mapping[str, tuple[File, Plan]]:
        found = dict[str, tuple[File, Plan]]()
        for name, (source, plan) in self.changed_files.items():
            if not isinstance(source, File):
                raise RefusedError("is in an object store, where files cannot be changed in place")
            found[name] = source, plan
        return found

    def check_in_place(self) -> None:
        """Raises RefusedError where a change in place would be refused."""
        check_folder_in_place(self.path, self._local(), force=self.force)

    def apply_in_place(self) -> int:
        """Change all files in place, verify and commit; return how many bytes were written."""
        with InPlaceFolder(self.path, self._local(), force=self.force) as changing:
            bytes_written = changing.write()
            for name in self.changed_files:
                written = changing.open_written(name)
                self.files[name].check(written, self.spelling, self.moves)
            changing.commit()
        return bytes_written
