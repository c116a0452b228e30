"""safetensors-sharded and torch-sharded: one checkpoint in several files, with an index.

    model.safetensors.index.json, pytorch_model.bin.index.json, diffusion_pytorch_model.…
    {"metadata": {"total_size": N, …}, "weight_map": {TENSOR: FILE, …}}
    model-00001-of-00002.safetensors, …: whole files of safetensors, or of torch

The files are beside the index. A name in it must be a plain file name, so that it can't lead
outside; the file may be a symbolic link within the folder, or to a blob in the cache of the Hub. If
ckptmove divided the checkpoint, its tree is in `metadata`, under `graph.tree_text.TREE`.

The index is refused if a tensor is missing in the file that it names, or is in two files. Tensors
that it does not list are read too, like by loaders that read whole files. The tensors of
safetensors files make one dict, or the stored tree. In torch files, each file holds a dict; these
are joined in the order of the file names, and tensors in one file keep sharing storages.

Sources: transformers/modeling_utils.py (`save_pretrained`, `_load_pretrained_model`),
huggingface_hub/serialization/_torch.py (`save_torch_state_dict`, `_load_sharded_checkpoint`).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from ...errors import CorruptError, InputError, UnsupportedError
from ...graph.tree_text import TREE
from ...manifest.manifest import Section
from ...pickles.nodes import Call, Dict, Global, Node, Tuple
from ...pickles.nodes import Mapping as MappingNode
from ...sources import Missing
from ...sources.source import Memory, Readable, Source
from ...torch_pickle.streams import Container
from ..base import Format, PickledFormat
from ..checkpoint import Carries, Checkpoint
from ..pickle import PlainPickle
from ..probe import Probe
from ..safetensors.file import SafetensorsContainer, SafetensorsFile, TensorInFile, TensorsContainer
from ..safetensors.header import LONGEST, HeaderEntry, quote, read_json
from ..torch.legacy import TorchLegacy
from ..torch.zip import TorchZip
from ..unread_formats import refusal_of
from .parts import IncompleteError, PartsContainer, number_files
from .weight_names import INDEXES, shard_name

#: The possible formats of its files.
_PARTS: tuple[PickledFormat, ...] = (TorchZip(), TorchLegacy(), SafetensorsFile(), PlainPickle())
_LONGEST_NAME = 255  # bytes of a file's name
_SEPARATORS = frozenset("/\\\0")
# an entry has four quotes in at least 40 bytes: the names of a tensor and a file
_NBYTES_OF_QUOTE = 10
_ORDERED = "collections.OrderedDict"


class Index(NamedTuple):
    """The index of a sharded checkpoint."""

    source: Readable
    where: Mapping[str, str]  #: name of a tensor → name of the file that holds it
    tree: str | None  #: the tree that `convert` stored in it, or None

    @property
    def files(self) -> list[str]:
        """The names of the files, sorted and without repetition."""
        return sorted(set(self.where.values()))


class Shard(NamedTuple):
    """One file of a sharded checkpoint."""

    name: str
    source: Source
    container: Container


class ShardedFormat(Format):
    """An index and its files; once they are read, `safetensors-sharded` or `torch-sharded`."""

    name = "sharded"
    suffixes = INDEXES
    summary = "transformers, diffusers, huggingface_hub: several files and their index"
    refused = (
        "to relocate it, since each of its files can be; an index that leads out of its folder, or "
        "contradicts the files"
    )
    carries = Carries(True, True, True, True, dtypes="those of its files")
    vague = True

    def sniff(self, probe: Probe) -> bool:
        """Whether it is JSON beside other files."""
        return probe.is_json and not probe.is_alone

    def files(self, probe: Probe) -> Sequence[str]:
        """The files that the index names."""
        return read_index(probe.source).files

    def read(self, probe: Probe) -> Checkpoint:
        index = read_index(probe.source)
        files = {name: _open(probe, name) for name in index.files}
        shards = [_shard(name, file) for name, file in files.items()]
        safe = {isinstance(shard.container, SafetensorsContainer) for shard in shards}
        if len(safe) > 1:
            raise UnsupportedError("its files have different formats")
        sources = [shard.source for shard in shards]
        if safe == {True}:
            return Checkpoint(
                "safetensors-sharded",
                _ShardedTensors(index, shards),
                SafetensorsFile.carries,
                sources,
                [probe.file],
            )
        return _ShardedCheckpoint(
            "torch-sharded", _ShardedPickles(index, shards), TorchZip.carries, sources, [probe.file]
        )


def read_index(source: Readable) -> Index:
    """Read an index; UnsupportedError if it is JSON of another kind."""
    if source.nbytes > LONGEST:
        raise UnsupportedError(f"is text of {source.nbytes:,} bytes, not a checkpoint")
    said = read_json(source.read(0, source.nbytes), "it", _NBYTES_OF_QUOTE)
    where = said.get("weight_map") if isinstance(said, dict) else None
    if where is None:
        raise UnsupportedError("is JSON, but not the index of a checkpoint")
    if not isinstance(where, dict) or not all(type(file) is str for file in where.values()):
        raise CorruptError("its weight_map does not give the file of each tensor")
    for file in sorted(set(where.values())):
        if not is_plain_name(file):
            raise CorruptError(f"it names {quote(file)}, which is not a file in the same folder")
    if not where:
        raise CorruptError("it lists no files")
    about = said.get("metadata")
    tree = about.get(TREE) if isinstance(about, dict) else None
    if tree is not None and not isinstance(tree, str):
        raise CorruptError("its tree is malformed")
    return Index(source, where, tree)


def unnamed_shards(
    names: Iterable[str],
    content: Callable[[str], bytes],
    known_files: Mapping[str, Iterable[str]] | None = None,
) -> set[str]:
    """Shards that the index beside them does not name.

    `names` are in one folder, or below it. `content` reads an index, unless `known_files` gives the
    files that it names. If an index can't be read, none of its shards is returned.
    """
    known, read = set(names), known_files or {}
    stray: dict[str, set[str]] = {}
    for name in known:
        shard = shard_name(name)
        for index in known.intersection(shard.indexes) if shard is not None else ():
            stray.setdefault(index, set()).add(name)
    named = set[str]()
    for index, files in stray.items():
        beside = index[: index.rfind("/") + 1]
        try:
            found = read.get(index) or read_index(Memory(content(index), index)).files
        except InputError:
            named |= files
        else:
            named.update(beside + each for each in found)
    return set().union(*stray.values()) - named


def file_names(checkpoint: Checkpoint) -> set[str]:
    """The file names of a checkpoint, without folders, as an index would spell them."""
    return {PurePath(each.path).name for each in checkpoint.files}


def is_plain_name(file: str) -> bool:
    """Whether the text is the name of a file in the same folder, on any operating system."""
    try:
        nbytes = len(file.encode("utf-8"))
    except UnicodeEncodeError:
        return False
    return 0 < nbytes <= _LONGEST_NAME and file not in (".", "..") and _SEPARATORS.isdisjoint(file)


def _open(probe: Probe, name: str) -> Probe:
    """Open a file that an index names."""
    try:
        return probe.open(name)
    except InputError as error:
        number = error.__cause__.errno if isinstance(error.__cause__, OSError) else None
        if number == errno.ENOENT or isinstance(error, Missing):
            why = f"its file {quote(name)} is missing"
            raise IncompleteError(why, hint="download it again") from error
        raise


def _shard(name: str, probe: Probe) -> Shard:
    """Open one file of a sharded checkpoint."""
    try:
        found = next((format for format in _PARTS if format.sniff(probe)), None)
        if found is None:
            raise refusal_of(probe)
        return Shard(name, probe.file, found.open(probe))
    except InputError as error:
        error.about(probe.path)
        raise


class _ShardedTensors(TensorsContainer):
    """Tensors by name, in several files."""

    def __init__(self, index: Index, shards: Sequence[Shard]) -> None:
        headers: dict[str, Mapping[str, HeaderEntry]] = {}
        own = list[str]()
        described, folders = index.source.nbytes, list[str]()
        placed: dict[str, TensorInFile] = {}
        for n, shard in enumerate(shards):
            assert isinstance(shard.container, SafetensorsContainer)
            header = shard.container.header
            folders.append(shard.container.folder)
            headers[shard.name] = header.entries
            described += header.data_at
            own += [shard.name] if TREE in header.metadata else []
            for name, entry in header.entries.items():
                placed[name] = TensorInFile(entry, shard.source, n)
        warnings: list[str] = []
        _check_shards(index, headers, warnings)
        if own:
            warnings.append(f"the tree in {own[0]} describes that one file only; it is ignored")
        metadata: dict[str, str] = {}
        for shard in shards:
            for key, said in shard.container.metadata.items():
                if metadata.setdefault(key, said) != said:
                    warnings.append(
                        f"its files have different values for the metadata {key!r}; one is kept"
                    )
        super().__init__(index.source, placed, index.tree, described, metadata, folders[0])
        self.warnings = [*dict.fromkeys(warnings), *self.warnings]
        self.writer = self.writer or shards[0].container.writer
        self._nbytes = index.source.nbytes + sum(shard.source.nbytes for shard in shards)

    @property
    def nbytes(self) -> int:
        return self._nbytes


class _ShardedCheckpoint(Checkpoint):
    """A checkpoint of several torch files."""

    def damage(self, report: Callable[[int], object]) -> Iterator[str]:
        """Like `Checkpoint.damage`, with the name of the file before each sentence."""
        for name, part in self.container.inner():
            for each in part.everything():
                yield from (f"{name}: {fault}" for fault in each.damage(report))


class _ShardedPickles(PartsContainer):
    """The dicts that torch saved in several files, as one dict."""

    section = Section.MODEL

    def __init__(self, index: Index, shards: Sequence[Shard]) -> None:
        super().__init__(index.source, {shard.name: shard.container for shard in shards})
        self.writer = shards[0].container.writer
        held: dict[str, list[str]] = {}
        pairs: list[tuple[Node, Node]] = []
        for n, shard in enumerate(shards):
            root = _dict_of(shard)
            held[shard.name] = [str(key) for key, _ in root.pairs]
            pairs += root.pairs
            if isinstance(root, Call) and (root.built or root.items):
                self.beside = "attributes of its dicts"
            number_files(shard.container, n)
        _check_shards(index, held, self.warnings)
        roots = [shard.container.roots[0][1] for shard in shards]
        self.roots = [((), _join_dicts(pairs, roots))]


def _dict_of(shard: Shard) -> Dict | Call:
    """The dict that torch saved in a file; its keys must be strings."""
    roots = shard.container.roots
    root = roots[0][1] if len(roots) == 1 and not roots[0][0] else None
    plain = isinstance(root, Dict) or (isinstance(root, Call) and root.qualname == _ORDERED)
    if shard.container.program or not plain or not isinstance(root, MappingNode):
        raise UnsupportedError(f"{shard.name} does not hold a dict of tensors")
    for key, _ in root.pairs:
        if not isinstance(key, str):
            raise UnsupportedError(f"{shard.name} holds a dict with a key that is not a string")
    names = {str(key) for key, _ in root.pairs}
    if len(names) != len(root.pairs):
        raise CorruptError(f"{shard.name} holds a dict that names a tensor twice")
    assert isinstance(root, (Dict, Call))
    return root


def _join_dicts(pairs: list[tuple[Node, Node]], roots: Sequence[Node]) -> Node:
    """Join the pairs of several dicts; the result is an ordered dict if all of them are."""
    joined: Dict | Call = Dict()
    if all(isinstance(root, Call) for root in roots):
        module, _, name = _ORDERED.rpartition(".")
        joined = Call(Global(module, name, 0), Tuple([], 0), "REDUCE", 0)
    joined.pairs = pairs
    return joined


def _check_shards(index: Index, held: Mapping[str, Iterable[str]], warnings: list[str]) -> None:
    """Check the names of tensors that each file holds against the index; add warnings."""
    found: dict[str, str] = {}
    for file, names in held.items():
        for name in names:
            if found.setdefault(name, file) != file:
                raise CorruptError(f"{quote(name)} is both in {found[name]} and in {file}")
    for name, file in index.where.items():
        if found.get(name) != file:
            raise CorruptError(f"{quote(name)} should be in {file}, but is not")
    unlisted = sorted(found.keys() - index.where.keys())
    if unlisted:
        warnings.append(
            f"its files hold {len(unlisted):,} tensors that the index does not list, "
            f"for example {quote(unlisted[0])}: they count as well"
        )
