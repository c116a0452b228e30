"""The header of a safetensors file: read strictly, and written like the library does.

    8 bytes     N, the length of the header, little-endian, at most 100,000,000
    N bytes     JSON: {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets"}, …};
                white space around it counts
    the rest    the tensors, contiguous and little-endian, without gaps; offsets count from here

Files that the library refuses are refused. So are files that it accepts by accident, or that torch
can't load: a repeated key (readers would disagree), a tensor spelled as a list, a dtype spelled as
an object, sizes beyond 63 bits even of an empty tensor, a float4 pair that is cut in half.

Sources: https://github.com/huggingface/safetensors, README.md (Format) and
safetensors/src/tensor.rs (`read_metadata`, `Metadata::validate`, `prepare`); serde_json for its
limits and its escapes.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from json.encoder import encode_basestring
from math import isfinite, prod
from operator import countOf
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from ...errors import CorruptError, RefusedError, UnsupportedError
from ...manifest.dtypes import SAFETENSORS, nbytes_of
from ...pickles.terms import JsonExtent, extent_of, has_long_number
from ...pickles.terms.spelling import has_surrogates
from ...sources.source import Readable

#: The size of the length field of the header, in bytes.
LENGTH_NBYTES = 8
#: The longest header that the library reads, in bytes.
LONGEST = 100_000_000
#: The result of `json.loads`.
Json: TypeAlias = Any
#: The key that does not name a tensor.
METADATA = "__metadata__"

_DEEPEST = 127  # levels of JSON that serde_json reads
_LONGEST_INTEGER = 20  # digits of a number of 64 bits
_LARGEST = (1 << 63) - 1  # the largest size that torch can count
_LONGEST_SHOWN = 100  # characters of a name in a message
_ALIGNMENT = 8
_LEAST_ROOM = 1 << 16  # brackets that any header may open
# of a header, for each further bracket; an entry opens three in at least 50 bytes
_NBYTES_OF_BRACKET = 8
_LEAST_QUOTES = 1 << 18  # quotation marks that any header may have
# of a header, for each further quotation mark; an entry has ten in at least 50 bytes
NBYTES_OF_QUOTE = 5
#: The tensors that any file may have, and the bytes of a file for each further one. A tensor takes
#: kilobytes of memory; the shortest takes 62 bytes of a file, and one with a few numbers and a
#: usual name 130.
_LEAST_TENSORS, _NBYTES_OF_TENSOR = 5 << 13, 128
_BRACKETS_OF_TENSOR = 3
_LEAST_EMPTY, _NBYTES_OF_EMPTY = 5 << 12, 512  # of a file, for each further tensor without bytes
_FLOAT4 = "float4_e2m1fn_x2"
_WITHOUT_TORCH = ("F6_E2M3", "F6_E3M2")
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MINUS_ZERO = re.compile(rb"-0(?<![0-9eE]-0)")
_NAMES = {torch: name for name, torch in SAFETENSORS.items()}
_RANK = {torch: rank for rank, torch in enumerate(reversed(SAFETENSORS.values()))}


class HeaderEntry(NamedTuple):
    """A tensor in a file that exists or will be written."""

    name: str
    #: torch's name of the dtype
    dtype: str
    #: the shape in torch: for float4, the last dimension counts pairs
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Header(NamedTuple):
    """The contents of a header: tensors in their order, and metadata; both may be empty."""

    entries: Mapping[str, HeaderEntry]
    metadata: Mapping[str, str]
    #: the offset where the header ends
    data_at: int


class TensorToWrite(NamedTuple):
    """A tensor to write: name, dtype and shape as in torch, and its size in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class FileLayout(NamedTuple):
    """The layout of a file to write: length and header, then the tensors without gaps."""

    head: bytes
    entries: Mapping[str, HeaderEntry]
    nbytes: int


def read_header(source: Readable) -> Header:
    """Read the header of a safetensors file, and check it against the size of the file.

    UnsupportedError if a tensor has a dtype that torch does not have.
    """
    if source.nbytes < LENGTH_NBYTES:
        raise CorruptError("it is too short for a safetensors file")
    length = int.from_bytes(source.read(0, LENGTH_NBYTES), "little")
    data_at = LENGTH_NBYTES + length
    if length > LONGEST:
        raise CorruptError(f"its header claims {length:,} bytes; the maximum is {LONGEST:,}")
    if data_at > source.nbytes:
        raise CorruptError(
            f"its header claims {length:,} bytes, and {source.nbytes - LENGTH_NBYTES:,} are there: "
            "the file is truncated or damaged"
        )
    most = most_tensors(source.nbytes)
    content = source.read(LENGTH_NBYTES, length)
    # All brackets belong to tensors, except one of the header and one of the metadata.
    root = read_json(content, "its header", most_brackets=2 + _BRACKETS_OF_TENSOR * most)
    if not isinstance(root, dict):
        raise CorruptError("its header is no JSON object")
    metadata = root.pop(METADATA, None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(type(text) is str for text in metadata.values()):
        raise CorruptError(f"the {METADATA} in its header is no object of strings")
    entries = {name: entry_of(name, said, data_at) for name, said in root.items()}
    empty = sum(not entry.nbytes for entry in entries.values())
    if empty > _LEAST_EMPTY + source.nbytes // _NBYTES_OF_EMPTY:
        raise CorruptError(f"its header names {empty:,} tensors without bytes, which is too many")
    _check_coverage(entries, data_at, source.nbytes)
    return Header(entries, metadata, data_at)


def most_tensors(nbytes: int) -> int:
    """The most tensors that a file of this size may have."""
    return _LEAST_TENSORS + nbytes // _NBYTES_OF_TENSOR


def read_json(
    content: bytes,
    what: str,
    nbytes_of_quote: int = NBYTES_OF_QUOTE,
    *,
    constants: bool = False,
    most_brackets: int | None = None,
) -> Json:
    """Parse JSON that all readers read alike: no key twice, and not nested too deeply.

    The first few hundred thousand quotation marks are always allowed; beyond that, each needs
    `nbytes_of_quote` bytes. `constants`: accept the NaN and Infinity that Python writes.
    `most_brackets`: the limit for `[` and `{`, in addition to a share of the length.
    """
    texts = _check_extent(content, what, nbytes_of_quote, most_brackets).quotes // 2
    # Without these, Python's own integers give the same result; `1e-08` in a string does not count.
    usual = not _MINUS_ZERO.search(content) and not has_long_number(content)
    parse = partial(
        json.loads,
        parse_int=None if usual else _integer,
        parse_float=_number,
        parse_constant=float if constants else _number,
    )
    try:
        text = content.decode("utf-8")
        root = parse(text)
        if _count_texts(root) != texts:  # a key is there twice, or objects lie deeper
            root = parse(text, object_pairs_hook=unique)
        if _ESCAPED_SURROGATE.search(content):
            json.dumps(root, ensure_ascii=False).encode("utf-8")
    except Twice as error:
        raise CorruptError(f"{what} says {quote(error.args[0])} twice") from error
    except UnicodeError as error:
        raise CorruptError(f"{what} holds invalid text") from error
    except ValueError as error:
        raise CorruptError(f"{what} is not JSON") from error
    return root


def _count_texts(root: Json) -> int:
    """How many texts an object has, keys included, down to the values of the objects in it."""
    if type(root) is not dict:
        return 0
    inner = [each for each in root.values() if type(each) is dict]
    values = chain(root.values(), chain.from_iterable(map(dict.values, inner)))
    return len(root) + sum(map(len, inner)) + countOf(map(type, values), str)


def _check_extent(
    content: bytes, what: str, nbytes_of_quote: int, most_brackets: int | None
) -> JsonExtent:
    """Check the depth and number of brackets, and the number of strings, before parsing."""
    extent = extent_of(content)
    if extent.depth > _DEEPEST:
        raise CorruptError(f"{what} is nested more than {_DEEPEST} levels deep")
    if most_brackets is not None and extent.opened > most_brackets:
        raise CorruptError(
            f"{what} has too many brackets, as for {extent.opened // _BRACKETS_OF_TENSOR:,} "
            "tensors: the file is too short for them"
        )
    if extent.opened > _LEAST_ROOM + len(content) // _NBYTES_OF_BRACKET:
        raise CorruptError(f"{what} has too many brackets")
    if extent.quotes > _LEAST_QUOTES + len(content) // nbytes_of_quote:
        raise CorruptError(f"{what} has too many strings")
    return extent


class Twice(Exception):
    """A key that occurs twice in an object: readers would disagree on it."""


def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """An object of JSON, for `json.loads` to call; Twice if a key occurs twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        counted = Counter(name for name, _ in pairs)
        raise Twice(counted.most_common(1)[0][0])
    return found


def _integer(digits: str) -> int | float:
    """An integer; like in serde_json, a float if it is beyond 64 bits or -0."""
    whole = len(digits) <= _LONGEST_INTEGER and digits != "-0"
    return int(digits) if whole else _number(digits)


def _number(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError("not a number of JSON, or out of range")
    return value


def entry_of(name: str, said: Json, data_at: int) -> HeaderEntry:
    """The entry of one tensor in the header; its offsets are not checked against the file."""
    if type(said) is not dict:
        raise _fault(name, "is no object")
    dtype, shape, offsets = said.get("dtype"), said.get("shape"), said.get("data_offsets")
    torch_dtype = SAFETENSORS.get(dtype) if type(dtype) is str else None
    if torch_dtype is None:
        if dtype in _WITHOUT_TORCH:
            raise UnsupportedError(
                f"the tensor {quote(name)} is of the dtype {dtype}, which torch does not have"
            )
        raise _fault(name, "has no known dtype")
    if not _are_sizes(shape):
        raise _fault(name, "has no proper shape")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _fault(name, "has no proper data_offsets")
    count = prod(shape) or prod(filter(None, shape))  # torch counts strides like this
    if count > _LARGEST:
        raise _fault(name, "claims more elements than there can be")
    if torch_dtype == _FLOAT4:
        if not shape or shape[-1] % 2:
            raise _fault(name, "holds half of a float4 pair")
        shape[-1] //= 2
        count //= 2
    nbytes = 0 if 0 in shape else nbytes_of(count, torch_dtype)
    begin, end = offsets
    if end - begin != nbytes:
        raise _fault(name, f"is {nbytes:,} bytes long, and its data_offsets are {begin} and {end}")
    return tuple.__new__(HeaderEntry, (name, torch_dtype, tuple(shape), data_at + begin, nbytes))


def _are_sizes(said: Json) -> TypeGuard[list[int]]:
    """Whether this is a list of integers from 0 up."""
    if type(said) is not list:
        return False
    for each in said:  # noqa: SIM110 (twice as fast as a generator)
        if type(each) is not int or each < 0:
            return False
    return True


def _check_coverage(entries: Mapping[str, HeaderEntry], data_at: int, nbytes: int) -> None:
    """Check that the tensors follow each other without gaps, up to the end of the file."""
    at = data_at
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.nbytes)):
        if entry.start != at:
            how = "leaves a gap before it" if entry.start > at else "overlaps the one before it"
            raise _fault(entry.name, how)
        at += entry.nbytes
    if at > nbytes:
        raise CorruptError(
            f"its tensors end at {at:,}, and the file at {nbytes:,}: it is truncated or damaged"
        )
    if at < nbytes:
        raise CorruptError(f"{nbytes - at:,} bytes follow the last tensor")


def _fault(name: str, what: str) -> CorruptError:
    return CorruptError(f"the tensor {quote(name)} {what}")


def quote(name: str) -> str:
    """A name for a message: quoted, on one line, and not too long."""
    return repr(name) if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]!r}…"


def lay_out(
    tensors: Sequence[TensorToWrite], metadata: Mapping[str, str] | None = None
) -> FileLayout:
    """Lay out a file byte for byte like the library does: largest alignment first, then by name.

    The library writes several metadata keys in any order; here they are sorted. Metadata of None
    are not written at all, unlike an empty mapping. RefusedError if the header would be longer than
    readers accept.
    """
    said, names = list[str](), set[str]()
    if metadata is not None:
        in_order = {METADATA: {key: metadata[key] for key in sorted(metadata)}}
        said.append(json.dumps(in_order, ensure_ascii=False, separators=(",", ":"))[1:-1])
    ordered, end = sorted(tensors, key=_order), 0
    for tensor in ordered:
        start, end = end, end + tensor.nbytes
        if tensor.name in names:
            raise RefusedError(f"two tensors would be named {quote(tensor.name)}")
        names.add(tensor.name)
        said.append(_entry_json(tensor, start, end))
    try:
        text = f"{{{','.join(said)}}}".encode()
    except UnicodeEncodeError as error:
        texts = [(key + value, f"metadata {quote(key)}") for key, value in (metadata or {}).items()]
        texts += [(each.name, f"name {quote(each.name)}") for each in ordered]
        what = next(what for text, what in texts if has_surrogates(text))
        message = f"safetensors can't spell the {what}: it holds an unpaired surrogate"
        raise UnsupportedError(message) from error
    padded = text + b" " * (-len(text) % _ALIGNMENT)
    if len(padded) > LONGEST:
        raise RefusedError(
            f"the header would need {len(padded):,} bytes; the maximum is {LONGEST:,}",
            hint="--max-shard-size writes the tensors to several files; fewer or shorter "
            "names also help",
        )
    at = LENGTH_NBYTES + len(padded)
    entries = {}
    for name, dtype, shape, nbytes in ordered:
        entries[name] = tuple.__new__(HeaderEntry, (name, dtype, shape, at, nbytes))
        at += nbytes
    if len(entries) > most_tensors(at):
        raise RefusedError(
            f"a file of {len(entries):,} tensors in {at:,} bytes would not be read again",
            hint="put small tensors together into one, or keep them in a .pt file",
        )
    return FileLayout(len(padded).to_bytes(LENGTH_NBYTES, "little") + padded, entries, at)


def _order(tensor: TensorToWrite) -> tuple[int, str]:
    """The sort key of tensors. The library compares UTF-8, which has the order of code points."""
    rank = _RANK.get(tensor.dtype)
    if rank is None:
        raise UnsupportedError(
            f"the tensor {quote(tensor.name)} is of {tensor.dtype}, which safetensors does not have"
        )
    return rank, tensor.name


def _entry_json(tensor: TensorToWrite, start: int, end: int) -> str:
    """The name and the entry of a tensor in the header; a dict of each would take memory."""
    name, dtype, shape, _ = tensor
    if name == METADATA:
        raise UnsupportedError(f"safetensors can't hold a tensor named {METADATA!r}")
    if dtype == _FLOAT4 and not shape:
        raise UnsupportedError(f"safetensors can't hold {quote(name)}, a single pair of float4")
    kind = _kind_json(dtype, shape)
    return f'{encode_basestring(name)}:{{{kind},"data_offsets":[{start},{end}]}}'


@lru_cache(1 << 7)  # limited, because sizes can be chosen to have equal hashes
def _kind_json(dtype: str, shape: tuple[int, ...]) -> str:
    """What the entries of similar tensors begin with, in the library's order."""
    sizes = [*shape[:-1], 2 * shape[-1]] if dtype == _FLOAT4 else shape
    return f'"dtype":"{_NAMES[dtype]}","shape":[{",".join(map(str, sizes))}]'
