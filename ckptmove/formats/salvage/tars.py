"""Read broken tars: models of NeMo, and files of torch 0.1; both are uncompressed.

    sys_info, pickle, tensors, storages     torch 0.1, in this order: the bytes come last
    ./, ./model_config.yaml, …              NeMo, in any order: `model_weights.ckpt` is a checkpoint

The header of a member has a checksum, but its content has none; the weights of NeMo have the
checksums of torch.save.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import replace

from ...errors import CorruptError, InputError
from ...sources.source import Source
from ...zips.found_records import ProofLevel
from ..archives.tar_archive import TarMember, starts_tar, walk_members
from ..diagnosis import damage_of
from ..probe import Probe
from ..torch.nemo import WEIGHTS
from ..torch.tar import TarContainer
from .listing import tensors_of
from .remains import MISSING, Remains, StorageRemains
from .zero_fill import ZeroFilledSource

_CUT = "the file ends within it"


def is_tar(probe: Probe) -> bool:
    """Whether it starts with a tar header."""
    return starts_tar(probe.head)


def read_tar(probe: Probe, read: Callable[[Probe], Remains]) -> Remains:
    """Read the remains of a tar.

    `read` reads the weights of NeMo, which are a file of torch.save.
    """
    source = probe.source
    assert isinstance(source, Source)
    members = dict[str, TarMember]()
    try:
        for member in walk_members(source, folders=True, broken=True):
            members.setdefault(posixpath.normpath(member.name), member)
    except InputError:
        pass  # the rest is lost
    weights = members.get(WEIGHTS)
    if weights is None:
        return _of_torch(probe, source, members)
    part = ZeroFilledSource(source, weights.start, weights.nbytes, weights.nbytes)
    found = read(Probe(part, probe.session))
    said = damage_of(source)
    damage = {posixpath.basename(source.path): said} if said else {}
    return replace(found, format="nemo", damage=damage)


def _of_torch(probe: Probe, source: Source, members: dict[str, TarMember]) -> Remains:
    """Read the remains of a tar of torch 0.1, where descriptions of tensors precede the bytes."""
    missing = [name for name in ("pickle", "tensors") if name not in members]
    if missing:
        raise CorruptError(f"is a tar without the member {missing[0]!r}, which names its tensors")
    end = TarMember("storages", source.nbytes, source.nbytes, 0, None)
    container = TarContainer(probe, {**members, "storages": members.get("storages", end)})
    storages = dict[str, StorageRemains]()
    named = [*container.ids.values(), *(each.storage for each in container.tensors.values())]
    for each in named:
        extent = container.extent_of(each.key)
        present = 0 if extent is None else extent.nbytes
        storages[each.id] = StorageRemains(
            each.whole_nbytes,
            min(present, each.whole_nbytes),
            ProofLevel.NONE,
            each.dtype,
            str(each.location),
            start=0 if extent is None else extent.start,
            why=MISSING if extent is None else _CUT,
        )
    return Remains("torch-tar", tensors_of(container).tensors, storages, [source])
