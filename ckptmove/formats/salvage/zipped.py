"""Read broken zips of torch: `data.pkl` names storages, and each is a record.

    P/data.pkl, P/data/0 …                 torch.save, TorchScript
    P/constants.pkl, P/constants/0 …       TorchScript
    P/any/name, P/.data/0.storage …        torch.package
    P/data/weights/weight_0 …              torch.export: see `programs`
    P/tensors/0 …                          TorchScript of torch 1.0 to 1.3: likewise
    policy.pth …                           a zip of checkpoints

If several zips follow each other, because several calls of `torch.save` wrote to the same open
file, each is read separately, and the names in it start with its number.

A record whose checksum is right is unchanged. If the pickle itself is missing, the storages have no
names: they are listed as bytes, under the names of their records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...errors import InputError
from ...sources.source import Memory, Readable, Source
from ...torch_pickle.streams import Container
from ...torch_pickle.values.persistent_ids import StorageId
from ...torch_pickle.values.strided import reach_of
from ...zips.archive import DEFLATED, STORED
from ...zips.found_records import FoundRecord, ProofLevel, find_records, read_record
from ...zips.in_a_row import zip_starts
from ..probe import Probe
from ..torch.legacy import starts
from .listing import ids_of, strict_storages, tensors_of
from .programs import ProgramRemains, program_of
from .remains import MISSING, NamedTensor, Remains, StorageRemains
from .zero_fill import ZeroFilledSource

#: The pickles, and the folders of the storages that they name.
_PICKLES = {"data.pkl": "data/", "constants.pkl": "constants/"}
_PACKAGED = ".data/"  # the folder of the storages of a package
#: Records of an exported program, its weights first.
_PROGRAM = "data/weights/", "models/", "archive_format"
_TENSORS = "tensors/"  # the tensors of TorchScript of torch 1.0 to 1.3
_NO_TENSORS = (".json", ".pt", ".pkl")  # other records of an exported program
_LOCAL_MAGIC, _PROTO = b"PK\3\4", b"\x80"
_HEAD = 64  # bytes needed to recognize a checkpoint
_UNSURE = "nothing but its own header says that it is this storage"
_LONGEST_ORDER = 64  # bytes


class _Part(NamedTuple):
    """A checkpoint in a zip, or in a file of several."""

    start: int
    nbytes: int
    prefix: str  #: the prefix of its tensors' names
    name_proven: bool  #: whether a checksum proves the prefix


class _Records(Container):
    """The contents of the pickles of a broken zip."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe.source)
        self.found = find_records(probe.source)
        self.prefix = _prefix(self.found)
        self.is_whole = self.is_proven = True
        self.budget = probe.session.budget
        # storage id → the storage, and the name of its record
        self.wanted: dict[str, tuple[StorageId, str]] = {}
        probe.session.folder()
        names = [name.removeprefix(self.prefix) for name in self.found]
        is_program = any(name.startswith(_PROGRAM) for name in names)
        raw = any(n.startswith(_PROGRAM[0]) and not n.endswith(_NO_TENSORS) for n in names)
        self.described = program_of(probe.source, self.found, self.prefix, probe.session)
        raw = raw or bool(self.described.parts)
        for name, folder in _PICKLES.items():
            record = self.found.get(self.prefix + name)
            if record is not None and not raw:  # else it belongs to a checkpoint within this one
                self._read(probe, record, folder, () if folder == "data/" else (folder[:-1],))
        packaged = [n for n in self.found if n.startswith(self.prefix + _PACKAGED)]
        self.is_package = any(n.endswith((".storage", "/extern_modules")) for n in packaged)
        if self.is_package and not self.roots:
            for record in self._packaged(probe.source):
                self._read(probe, record, _PACKAGED, (record.name.removeprefix(self.prefix),))
        if is_program or not all(name.startswith(self.prefix) for name in self.found):
            # some records belong to another checkpoint, or this one is nested in another
            self.is_whole = self.is_proven = False
        order = self.found.get(f"{self.prefix}byteorder")
        self.order_proven = order is not None and order.proof is ProofLevel.RIGHT
        if order is not None:
            text = read_record(probe.source, order, _LONGEST_ORDER)
            self.big_endian = text == b"big"
            self.is_proven = self.is_proven and order.proof is not ProofLevel.WRONG

    def _packaged(self, source: Readable) -> Iterator[FoundRecord]:
        """The pickles of a package, recognized by their first byte."""
        for record in self.found.values():
            beside = not record.name.startswith(self.prefix + _PACKAGED)
            may_be = beside and record.stored_nbytes and not record.name.endswith(".py")
            if may_be and read_record(source, record, 1) == _PROTO:
                yield record

    def _read(self, probe: Probe, record: FoundRecord, folder: str, path: tuple[str, ...]) -> None:
        content = read_record(probe.source, record)
        if record.method == DEFLATED and not probe.session.budget.unpack(
            record.stored_nbytes, len(content)
        ):
            self.is_whole = False
            self.warnings.append(f"{record.name} is compressed too tightly to be read")
            return
        stream = probe.session.stream(Memory(content, probe.path), broken=True)
        self.streams.append(stream)
        self.roots.append((path, stream.pickle.root))
        packaged = folder == _PACKAGED
        ids = ids_of(stream.pickle.persistents, folder, numbered=packaged)
        self.ids.update(ids)
        suffix = ".storage" if packaged else ""
        for each in ids.values():
            self.wanted.setdefault(each.id, (each, f"{self.prefix}{each.id}{suffix}"))
        self.is_whole = self.is_whole and stream.is_whole
        self.is_proven = self.is_proven and record.proof is ProofLevel.RIGHT


def read_zip(probe: Probe, read: Callable[[Probe], Remains] | None = None) -> Remains:
    """Read the remains of a torch zip; or of a zip of checkpoints, each of which `read` reads."""
    starts_of_zips = zip_starts(probe.source)
    if len(starts_of_zips) > 1 and read is not None and isinstance(probe.source, Source):
        return _of_zips_in_a_row(probe, probe.source, starts_of_zips, read)
    container = _Records(probe)
    files = [probe.source] if isinstance(probe.source, Source) else []
    format = "torchscript" if f"{container.prefix}constants.pkl" in container.found else "torch-zip"
    format = "torch-package" if container.is_package and container.roots else format
    if not container.roots and (container.described.tensors or container.described.parts):
        return _of_program(probe, container, container.described, files, read)
    members = _members(container) if files and read is not None else {}
    if members and read is not None:
        # the other contents of the zip are not known
        bundle = Remains("zip-bundle", [], {}, [], names_complete=False)
        return _of_parts(probe, files[0], members, read, bundle)
    if not container.roots:
        return _unnamed(container, format, files)
    storages = {
        key: _storage(
            container, each.whole_nbytes, each.dtype, str(each.location), container.found.get(name)
        )
        for key, (each, name) in container.wanted.items()
    }
    for key, (storage, held) in strict_storages(container).items():
        content = None if storage.extent else held.content(key)
        start = storage.extent.start if storage.extent else 0
        storages[key] = StorageRemains(
            *(
                storage.nbytes,
                storage.nbytes,
                ProofLevel.NONE,
                storage.dtype,
                storage.location,
                start,
            ),
            content=content,
            big_endian=held.big_endian,
        )
    listed = tensors_of(container)
    return Remains(
        format,
        listed.tensors,
        {**storages, **listed.arrays},
        files,
        container.is_proven,
        container.is_whole,
        container.warnings,
    )


def _of_zips_in_a_row(
    probe: Probe, source: Source, starts_of_zips: Sequence[int], read: Callable[[Probe], Remains]
) -> Remains:
    """Read the remains of each of several zips in one file."""
    ends = (*starts_of_zips[1:], source.nbytes)
    parts = {
        f"zip {n}": _Part(start, end - start, f"{n}.", name_proven=True)
        for n, (start, end) in enumerate(zip(starts_of_zips, ends, strict=True))
    }
    found = Remains("torch-zip", [], {}, [], names_proven=True)
    found.warnings.append(
        f"{len(parts):,} zips follow each other in it: names start with their number, from 0"
    )
    return _of_parts(probe, source, parts, read, found)


def _part_in(record: FoundRecord, prefix: str) -> _Part:
    """The checkpoint that a record contains."""
    return _Part(record.data_at, record.stored_nbytes, prefix, record.is_named_twice)


def _members(container: _Records) -> dict[str, _Part]:
    """The records that are checkpoints themselves, if the zip itself is not one of torch."""
    members = dict[str, _Part]()
    end = 0
    for name, record in sorted(container.found.items(), key=lambda item: item[1].header_at):
        if record.header_at < end:
            continue  # it is inside the record before
        of_torch = name.rpartition("/")[2] in _PICKLES or "/.data/" in name
        if record.proof is not ProofLevel.WRONG and (of_torch or "/data/weights/" in name):
            return {}
        head = container.source.read(record.data_at, min(record.stored_nbytes, _HEAD))
        if record.method == STORED and (head.startswith(_LOCAL_MAGIC) or starts(head)):
            members[name] = _part_in(record, f"{name}.")
            end = record.data_at + record.stored_nbytes
    return members


def _of_parts(
    probe: Probe,
    source: Source,
    parts: Mapping[str, _Part],
    read: Callable[[Probe], Remains],
    found: Remains,
) -> Remains:
    """Add the remains of checkpoints in a zip, or in a file, to those already found."""
    tensors, storages, files = list(found.tensors), dict(found.storages), list(found.files)
    proven, complete = found.names_proven, found.names_complete
    for name, each_part in parts.items():
        content = ZeroFilledSource(source, each_part.start, each_part.nbytes, each_part.nbytes)
        try:
            held = read(Probe(content, probe.session))
            held = held.renumber(len(files), name, each_part.prefix)
        except InputError as error:
            found.warnings.append(f"{name}: {error}")
            complete = False
            continue
        proven, complete = proven and held.names_proven, complete and held.names_complete
        # no checksum covers its name, with which the tensors' names start
        if not each_part.name_proven:
            named = [each._replace(proven=False) for each in held.tensors]
            held = replace(held, tensors=named)
        tensors += held.tensors
        storages |= held.storages
        files += held.files
        found.warnings += (f"{name}: {each}" for each in held.warnings)
    return replace(
        found,
        tensors=tensors,
        storages=storages,
        files=files,
        names_proven=proven,
        names_complete=complete,
    )


def _of_program(
    probe: Probe,
    container: _Records,
    program: ProgramRemains,
    files: list[Source],
    read: Callable[[Probe], Remains] | None,
) -> Remains:
    """Read the remains of an exported program, or of a TorchScript program of torch 1.0 to 1.3."""
    scripted = any(each.record.startswith(container.prefix + _TENSORS) for each in program.tensors)
    ordered = scripted or container.order_proven
    found = _unnamed(container, "torchscript-v1" if scripted else "torch-export", files)
    storages = {f"{container.prefix}{key}": each for key, each in found.storages.items()}
    named, nbytes = list[NamedTensor](), dict[str, int]()
    for _, record, view, _ in program.tensors:
        try:
            reach = reach_of(view.shape, view.stride, view.offset, view.dtype)
        except InputError:
            continue  # handled below
        nbytes[record] = max(nbytes.get(record, 0), reach)
    for name, record, view, proven in program.tensors:
        held = container.found.get(record)
        whole = held is not None and held.proof is ProofLevel.RIGHT
        size = held.stored_nbytes if held is not None and whole else nbytes.get(record, 0)
        storages[record] = _storage(container, size, view.dtype, view.device, held)
        own = view.nbytes
        shown = view.shape, view.stride, view.offset
        named.append(NamedTensor(name, view.dtype, *shown, own, record, proven=proven and ordered))
    known = {each.record for each in program.tensors}
    rest = [each for each in found.tensors if f"{container.prefix}{each.storage}" not in known]
    named += (each._replace(storage=f"{container.prefix}{each.storage}") for each in rest)
    warnings = [*container.warnings, *program.warnings, *(found.warnings if rest else ())]
    found = replace(found, tensors=named, storages=storages, warnings=warnings)
    parts = {
        name: _part_in(container.found[name], prefix)
        for name, prefix in program.parts.items()
        if name in container.found and container.found[name].stored_nbytes
    }
    return found if read is None or not files else _of_parts(probe, files[0], parts, read, found)


def _prefix(found: Mapping[str, FoundRecord]) -> str:
    """The folder of all records: that of a pickle, or else that of the first record."""
    names = [name for name in found if name.rpartition("/")[2] in _PICKLES]
    first = min(names, key=len) if names else next(iter(found), "")
    return first[: first.rfind("/") + 1] if names else first[: first.find("/") + 1]


def _storage(
    container: _Records, nbytes: int, dtype: str | None, device: str, record: FoundRecord | None
) -> StorageRemains:
    """The remains of a storage, given its record, or None if the record is missing."""
    held = StorageRemains(
        nbytes,
        0,
        ProofLevel.CUT,
        dtype,
        device,
        big_endian=container.big_endian,
        why=MISSING,
    )
    if record is None:
        return held
    held = held._replace(proof=record.proof, start=record.data_at, crc32=record.crc32)
    if record.method == DEFLATED:
        if not container.budget.inflate(record.stored_nbytes, nbytes):
            return held._replace(crc32=0, why="it is compressed too tightly")
        content = read_record(container.source, record, nbytes + 1)
        if record.proof is not ProofLevel.RIGHT or len(content) != nbytes:
            return held._replace(crc32=0, why="it is compressed, and damaged")
        return held._replace(present=nbytes, content=content, crc32=0)
    assert record.method == STORED
    present = min(nbytes, record.stored_nbytes)
    if record.proof is not ProofLevel.RIGHT:
        held = held._replace(crc32=0)
    elif record.stored_nbytes != nbytes:
        held = held._replace(proof=ProofLevel.WRONG, crc32=0, why="its record has another size")
    elif not record.is_named_twice:
        held = held._replace(proof=ProofLevel.NONE, why=_UNSURE)
    if record.proof is ProofLevel.CUT:
        held = held._replace(why="the file ends within it, or it was overwritten")
    return held._replace(present=present)


def _unnamed(container: _Records, format: str, files: list[Source]) -> Remains:
    """The storages as plain bytes, if the data that names the tensors is lost."""
    storages: dict[str, StorageRemains] = {}
    tensors: list[NamedTensor] = []
    folders = tuple(f"{container.prefix}{folder}" for folder in (*_PICKLES.values(), _TENSORS))
    for name, record in container.found.items():
        if not name.startswith(folders) or record.method != STORED or not record.stored_nbytes:
            continue
        if record.proof is ProofLevel.CUT or name.endswith(_NO_TENSORS):
            continue  # its size is unknown
        key, nbytes = name.removeprefix(container.prefix), record.stored_nbytes
        storages[key] = StorageRemains(
            nbytes,
            nbytes,
            record.proof,
            "uint8",
            start=record.data_at,
            crc32=record.crc32 if record.proof is ProofLevel.RIGHT else 0,
        )
        tensors.append(NamedTensor(key, "uint8", (nbytes,), (1,), 0, nbytes, key))
    note = "the pickle that names its tensors is missing: storages are listed as plain bytes"
    return Remains(format, tensors, storages, files, False, False, [note])
