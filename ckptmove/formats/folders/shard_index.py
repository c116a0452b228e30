"""The index of a checkpoint in several files, as Hugging Face's libraries write and read it.

    model.safetensors.index.json, pytorch_model.bin.index.json, diffusion_pytorch_model.…
    {"metadata": {"total_size": N, …}, "weight_map": {TENSOR: FILE, …}}

The files are beside the index. A name in it must be a plain file name, so that none leads
elsewhere; the file may be a symbolic link within the folder, or to a blob in the cache of the Hub.
If ckptmove divided the checkpoint, its tree is in `metadata`, under `graph.tree_text.TREE`.

An index that contradicts its files is refused: a tensor that is not in the file it should be in, or
in two of them. Tensors that the index does not list are read too, as by loaders that read whole
files.

Source: huggingface_hub/serialization/_torch.py (`save_torch_state_dict`,
`_load_sharded_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...errors import CorruptError, UnsupportedError
from ...graph.tree_text import TREE
from ...sources.source import Readable
from ..safetensors.header import LONGEST, read_json, shown

_LONGEST_NAME = 255  # bytes of a file's name
_SEPARATORS = frozenset("/\\\0")
_NBYTES_OF_QUOTE = 10  # an entry has four in 40 bytes at least: a name, and that of a file


class Index(NamedTuple):
    """Where the tensors of a checkpoint are."""

    source: Readable
    where: Mapping[str, str]  #: name of a tensor → name of the file that holds it
    tree: str | None  #: what it tells of the tree, if it does

    @property
    def files(self) -> list[str]:
        """The files, each once: sorted, as they are numbered."""
        return sorted(set(self.where.values()))


def read_index(source: Readable) -> Index:
    """Read an index.

    Raises:
        CorruptError: it is damaged, too long, or leads out of its folder.
        UnsupportedError: it is JSON of another kind.
    """
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
            raise CorruptError(f"it names {shown(file)}, which is not a file in the same folder")
    if not where:
        raise CorruptError("it lists no files")
    about = said.get("metadata")
    tree = about.get(TREE) if isinstance(about, dict) else None
    if tree is not None and not isinstance(tree, str):
        raise CorruptError("its tree is malformed")
    return Index(source, where, tree)


def is_plain_name(file: str) -> bool:
    """Whether this names a file in a folder, whichever system reads it, and nothing elsewhere."""
    try:
        nbytes = len(file.encode("utf-8"))
    except UnicodeEncodeError:
        return False
    return 0 < nbytes <= _LONGEST_NAME and file not in (".", "..") and _SEPARATORS.isdisjoint(file)


def check_shards(index: Index, held: Mapping[str, Iterable[str]], warnings: list[str]) -> None:
    """Check what the files hold against the index.

    Args:
        index: the index.
        held: name of a file → the names of its tensors.
        warnings: what is odd about it is added to these.

    Raises:
        CorruptError: they contradict each other.
    """
    found: dict[str, str] = {}
    for file, names in held.items():
        for name in names:
            if found.setdefault(name, file) != file:
                raise CorruptError(f"{shown(name)} is both in {found[name]} and in {file}")
    for name, file in index.where.items():
        if found.get(name) != file:
            raise CorruptError(f"{shown(name)} should be in {file}, but is not")
    unlisted = sorted(found.keys() - index.where.keys())
    if unlisted:
        warnings.append(
            f"its files hold {len(unlisted):,} tensors that the index does not list, "
            f"for example {shown(unlisted[0])}: they count as well"
        )
