"""nemo: the format in which NVIDIA NeMo saves a model (`save_to`): an uncompressed tar of files.

    ./                         the folder that was packed
    ./model_config.yaml        the configuration
    ./model_weights.ckpt       the state dict, as torch.save wrote it
    ./HASH_tokenizer.model, …  files of the model

The checkpoint is that of `model_weights.ckpt`, which is read in place; nothing is unpacked. The
other members are shown as files. Relocating changes the devices in the weights; if their size
changes, the header of the member is updated, and the bytes after it move. Older versions of NeMo,
and `tar -z`, compress the tar, which is refused. So are weights in parts: a folder `model_weights/`
of a distributed checkpoint, `mp_rank_00/model_weights.ckpt` of tensor parallelism.

Names must be those of files below the folder. Links are refused, and so are repeated names, with or
without `./`.

Source: nemo/core/connectors/save_restore_connector.py (`save_to`, `_make_nemo_file_from_folder`).
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from functools import cached_property, partial

from ...errors import CorruptError, InputError, UnsupportedError
from ...manifest.manifest import Section
from ...manifest.other_records import HeldRecord, OtherRecord, RecordKind
from ...manifest.paths import Path
from ...plans.plan import Edit, Plan, apply_edits
from ...sources.source import Readable
from ...torch_pickle.streams import Container, LocationEdits
from ..archives.tar_archive import (
    TarMember,
    bytes_behind,
    edits_to_resize,
    starts_tar,
    walk_members,
)
from ..base import PickledFormat, runs_nothing
from ..checkpoint import Carries
from ..probe import Probe

WEIGHTS = "model_weights.ckpt"
_CONFIG = "model_config.yaml"
_IN_PARTS = "model_weights/"


class Nemo(PickledFormat):
    """The format of a model of NeMo."""

    name = "nemo"
    suffixes = (".nemo",)
    summary = "NVIDIA NeMo: `model.save_to`, a tar with `model_weights.ckpt`"
    refused = "compressed tars; weights in parts: distributed checkpoints, tensor parallelism"
    carries = Carries(devices=True, aliases=True, strides=True, objects=True, dtypes="all of torch")

    def sniff(self, probe: Probe) -> bool:
        """Whether it is a tar with weights under NeMo's names, as far as it can be read."""
        if not starts_tar(probe.head):
            return False
        try:
            found = any(map(_is_of_weights, walk_members(probe.source, folders=True)))
        except InputError:
            return False
        return found and runs_nothing(probe)

    def open(self, probe: Probe) -> NemoContainer:
        """Read the headers of the tar, and the description of the weights."""
        return NemoContainer(probe)


class NemoContainer(Container):
    """The weights in a tar, and its other members as files."""

    def __init__(self, probe: Probe) -> None:
        """Read the headers of the tar, and the pickle of the weights."""
        super().__init__(probe.source)
        self.session = probe.session
        self.members: dict[str, TarMember] = {}
        end = 0
        for member in walk_members(self.source, folders=True):
            name = _checked_name(member)
            if name in self.members:
                raise CorruptError(f"the tar has two members {name!r:.100}")
            self.members[name] = member
            end = member.end
        self._check_whole()
        self._member = self.members[WEIGHTS]
        weights = self.source.window(self._member.start, self._member.nbytes)
        try:
            found = probe.session.open(weights)
        except InputError as error:
            raise type(error)(f"{WEIGHTS}: {error}", hint=error.hint) from error
        if found is None:
            raise CorruptError(f"{WEIGHTS} in it is no checkpoint")
        self.weights = found
        self.roots = list(found.roots)
        self.writer = found.writer
        if _CONFIG not in self.members:
            self.warnings.append(f"there is no {_CONFIG} in it, which NeMo needs")
        self.warnings += bytes_behind(self.source, end)

    def _check_whole(self) -> None:
        """UnsupportedError if the weights are in several files."""
        several = [name for name in self.members if name.endswith(f"/{WEIGHTS}")]
        parts = [name for name in self.members if name.startswith(_IN_PARTS)]
        if parts:
            raise UnsupportedError(
                f"is a .nemo with a distributed checkpoint in it: {_IN_PARTS}",
                hint="unpack it and give that folder: tar -xf FILE",
            )
        if WEIGHTS not in self.members:
            raise UnsupportedError(
                f"is a .nemo whose weights are in parts, such as {several[0]!r:.100}",
                hint="merge them with NeMo first",
            )

    def section_at(self, path: Path) -> Section:
        return self.weights.section_at(path)

    def everything(self) -> Iterator[Container]:
        """This container and all containers in the weights, at any depth."""
        yield self
        yield from self.weights.everything()

    def inner(self) -> Iterator[tuple[str, Container]]:
        return iter([(WEIGHTS, self.weights)])

    def records(self) -> Iterator[HeldRecord]:
        for name, member in self.members.items():
            if name != WEIGHTS and not name.endswith("/"):
                content = partial(self._window, member)
                yield HeldRecord(OtherRecord(name, RecordKind.DATA, member.nbytes), content)

    def unknown_callables(self) -> Iterator[str]:
        yield from super().unknown_callables()
        yield from self._beside

    @cached_property
    def _beside(self) -> tuple[str, ...]:
        """The unknown callables in other members: a program may load what NeMo does not."""
        return tuple(self.session.callables_beside(self.records()))

    def _window(self, member: TarMember, _no_devices: bool) -> Readable:
        return self.source.window(member.start, member.nbytes)

    def plan(self, spelling: LocationEdits) -> Plan:
        """Patch a clone if the weights keep their length; otherwise move the bytes after them."""
        plan, member = self.weights.plan(spelling), self._member
        changes = [] if plan.method == "clone" else [Edit(member.start, member.end, plan)]
        if plan.nbytes != member.nbytes:
            changes += edits_to_resize(self.source, member, plan.nbytes)
        return apply_edits(self.source.start or 0, self.source.nbytes, changes)

    def frame(self, spelling: LocationEdits | None = None) -> object:
        """The names of the members, in order."""
        return [member.name for member in self.members.values()]


def _is_of_weights(member: TarMember) -> bool:
    name = posixpath.normpath(member.name)
    return posixpath.basename(name) == WEIGHTS or f"{name}/".startswith(_IN_PARTS)


def _checked_name(member: TarMember) -> str:
    """The name of a member, relative to the packed folder; a folder's name ends in a slash.

    UnsupportedError if it could lead outside when the tar is unpacked.
    """
    name = member.name
    plain = name.removeprefix("./").removesuffix("/")
    if name != "./":
        keys = plain.split("/")
        if "" in keys or "." in keys or ".." in keys or "\\" in name or ":" in keys[0]:
            raise UnsupportedError(f"is a tar with the member {name!r:.100}, which leads elsewhere")
    return f"{plain}/" if name.endswith("/") else plain
