"""Headers of safetensors files: read as strictly as the library does, laid out byte for byte so."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from safetensors.torch import save_file

from ckptmove.errors import CorruptError, InputError, RefusedError, UnsupportedError
from ckptmove.formats.safetensors.header import Header, TensorToWrite, lay_out, read_header
from ckptmove.manifest.dtypes import SAFETENSORS
from ckptmove.sources.file import File
from ckptmove.sources.source import Memory
from tests.conftest import examples

Json = Any
DTYPES = [getattr(torch, name) for name in SAFETENSORS.values() if hasattr(torch, name)]
FILE_SETTINGS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def framed(header: bytes, data: bytes = b"") -> bytes:
    """A file of that header."""
    return len(header).to_bytes(8, "little") + header + data


def said(content: bytes) -> tuple[Json, bytes]:
    """The header of a file as JSON, and the bytes that follow it."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def read(content: bytes) -> Header:
    return read_header(Memory(content, "x.safetensors"))


# -- what the library writes -----------------------------------------------------------------------


def names() -> st.SearchStrategy[str]:
    """Names of tensors: everyday ones, and all that Unicode has."""
    everyday = st.sampled_from(
        ["", "a", "a.b", "model.layers.0.weight", "é", "\U0001f525\x00\x7f", '"\\/']
    )
    return (everyday | st.text(max_size=8)).filter(lambda name: name != "__metadata__")


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A contiguous tensor of any dtype of safetensors; some are 0-d, some empty."""
    dtype = draw(st.sampled_from(DTYPES))
    least = 1 if dtype is torch.float4_e2m1fn_x2 else 0
    shape = draw(st.lists(st.integers(0, 3), min_size=least, max_size=4))
    made = torch.arange(torch.Size(shape).numel() * dtype.itemsize).to(torch.uint8)
    return (made & 1 if dtype is torch.bool else made).view(dtype).view(shape)


def state_dicts() -> st.SearchStrategy[dict[str, torch.Tensor]]:
    return st.dictionaries(names(), tensors(), max_size=6)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor's elements."""
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())


METADATA = st.none() | st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=1)


def sized(tensors: dict[str, torch.Tensor]) -> list[TensorToWrite]:
    return [
        TensorToWrite(name, str(each.dtype).removeprefix("torch."), tuple(each.shape), each.nbytes)
        for name, each in tensors.items()
    ]


@FILE_SETTINGS
@given(tensors=state_dicts(), metadata=METADATA, order=st.randoms(use_true_random=False))
@example(tensors={}, metadata=None, order=random.Random(0))
def test_a_file_is_laid_out_as_the_library_does(
    tensors: dict[str, torch.Tensor],
    metadata: dict[str, str] | None,
    order: random.Random,
    tmp_path: Path,
) -> None:
    assume(tensors or metadata != {})  # the library writes no JSON then
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata)
    given = sized(tensors)
    order.shuffle(given)
    made = lay_out(given, metadata)
    content = b"".join([made.head, *(raw(tensors[name]) for name in made.entries)])
    assert content == path.read_bytes()
    assert made.nbytes == len(content)
    for name, entry in made.entries.items():
        assert content[entry.start : entry.start + entry.nbytes] == raw(tensors[name])


@FILE_SETTINGS
@given(tensors=state_dicts(), metadata=METADATA)
def test_a_file_is_read_as_the_library_does(
    tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    assume(tensors or metadata != {})
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata)
    content = path.read_bytes()
    with File.open(path) as source:
        header = read_header(source)
    assert header == read(content)
    assert header.metadata == (metadata or {})
    assert list(header.entries) == [name for name in said(content)[0] if name != "__metadata__"]
    assert {TensorToWrite(*entry[:3], entry.nbytes) for entry in header.entries.values()} == set(
        sized(tensors)
    )
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(header.entries)
        for name, entry in header.entries.items():
            found = file.get_tensor(name)
            assert (entry.dtype, entry.shape) == (str(found.dtype)[6:], tuple(found.shape))
            assert content[entry.start : entry.start + entry.nbytes] == raw(found)


def test_nothing_at_all_is_laid_out(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    nothing: dict[str, str] = {}
    for metadata in (None, nothing):
        path.write_bytes(lay_out([], metadata).head)
        assert opens(path)


def test_several_metadata_are_sorted() -> None:
    made = lay_out([], {"b": "1", "a": "2", "é": "3"})
    assert said(made.head)[0] == {"__metadata__": {"a": "2", "b": "1", "é": "3"}}
    assert list(said(made.head)[0]["__metadata__"]) == ["a", "b", "é"]
    assert read(made.head).metadata == {"a": "2", "b": "1", "é": "3"}


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (TensorToWrite("x", "complex128", (1,), 16), "the tensor 'x' is of complex128"),
        (TensorToWrite("x", "qint8", (1,), 1), "the tensor 'x' is of qint8"),
        (TensorToWrite("x", "float4_e2m1fn_x2", (), 1), "a single pair of float4"),
        (TensorToWrite("x\ud800", "int8", (1,), 1), "can't spell the name 'x\\ud800'"),
        (
            TensorToWrite("__metadata__", "int8", (1,), 1),
            "can't hold a tensor named '__metadata__'",
        ),
    ],
)
def test_what_has_no_form_is_unsupported(tensor: TensorToWrite, message: str) -> None:
    for metadata in (None, {"format": "pt"}):
        with pytest.raises(UnsupportedError, match=re.escape(message)):
            lay_out([tensor], metadata)


def test_metadata_that_are_not_unicode_are_unsupported() -> None:
    for metadata in ({"a": "\udfff"}, {"\udfff": "a"}):
        with pytest.raises(UnsupportedError, match="can't spell the metadata"):
            lay_out([], metadata)


def test_two_tensors_of_a_name_are_refused() -> None:
    with pytest.raises(RefusedError, match="two tensors would be named 'x'"):
        lay_out([TensorToWrite("x", "int8", (1,), 1), TensorToWrite("x", "int16", (1,), 2)])


@pytest.mark.slow
def test_a_header_that_nobody_reads_is_refused() -> None:
    around = len(said_of({"x": ""}))
    longest = lay_out([], {"x": "y" * (100_000_000 - around)})
    assert len(longest.head) == 8 + 100_000_000
    assert read(longest.head).data_at == 8 + 100_000_000
    with pytest.raises(RefusedError, match="would need 100,000,008 bytes") as raised:
        lay_out([], {"x": "y" * (100_000_001 - around)})
    assert "--max-shard-size" in (raised.value.hint or "")


def said_of(metadata: dict[str, str]) -> str:
    return json.dumps({"__metadata__": metadata}, separators=(",", ":"))


# -- what the library refuses ----------------------------------------------------------------------

#: Why we refuse what the library opens: it is an accident, or torch can't load it.
STRICTER = (
    r"says '.*' twice",
    r"is no object$",  # a tensor spelled as a list
    r"has no known dtype",  # one spelled as an object
    r"claims more elements",
    r"half of a float4 pair",
    r"which torch does not have",
)


def opens(path: Path) -> bool:
    """Whether the library opens a file; it validates the header then."""
    try:
        with safe_open(path, "pt"):
            return True
    except SafetensorError:
        return False


def assert_like_the_library(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    try:
        read(content)
    except InputError as error:
        told = str(error)
        assert "\n" not in told
        assert len(told) < 400
        stricter = any(re.search(reason, told) for reason in STRICTER)
        assert stricter or not opens(path), f"the library opens it, and it is refused: {told}"
    else:
        assert opens(path), "the library refuses it, and it is read"


def empty(shape: str, dtype: str = "U8") -> str:
    """The header of a file with a tensor that is said to take no bytes."""
    return f'{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,0]}}}}'


ZERO = '"dtype":"U8","shape":[0],"data_offsets":[0,0]'
BYTE = '"dtype":"U8","shape":[1],"data_offsets":[0,1]'
HEADERS = {
    "empty": "{}",
    "white space": " \t\r\n{} \n",
    "form feed": "\f{}",
    "padded with NUL": "{}\0",
    "byte order mark": "\ufeff{}",
    "two": "{}{}",
    "list": "[]",
    "null": "null",
    "none": "",
    "blank": "  ",
    "open": "{",
    "single quotes": "{'a':1}",
    "trailing comma": "{" + f'"a":{{{ZERO}}},' + "}",
    "tensor": f'{{"a":{{{ZERO}}}}}',
    "no name": f'{{"":{{{ZERO}}}}}',
    "two empty ones": f'{{"a":{{{ZERO}}},"b":{{{ZERO}}}}}',
    "control character": f'{{"a\n":{{{ZERO}}}}}',
    "escapes": f'{{"\\u0000\\n\\ud83d\\ude00\\/":{{{ZERO}}}}}',
    "lone surrogate": f'{{"\\ud800":{{{ZERO}}}}}',
    "lone surrogate, the other": f'{{"\\uDFFF":{{{ZERO}}}}}',
    "surrogates swapped": f'{{"\\ude00\\ud83d":{{{ZERO}}}}}',
    "no surrogate, but the escape of one": f'{{"\\\\ud800":{{{ZERO}}}}}',
    "surrogate in passing": f'{{"a":{{{ZERO},"x":"\\ud800"}}}}',
    "more keys": f'{{"a":{{{ZERO},"x":{{"y":[1e5,{{}},null,true]}}}}}}',
    "more keys, infinite": f'{{"a":{{{ZERO},"x":1e999}}}}',
    "more keys, NaN": f'{{"a":{{{ZERO},"x":NaN}}}}',
    "more keys, Infinity": f'{{"a":{{{ZERO},"x":-Infinity}}}}',
    "more keys, a long number": f'{{"a":{{{ZERO},"x":1{"0" * 300}}}}}',
    "more keys, too long a number": f'{{"a":{{{ZERO},"x":1{"0" * 5000}}}}}',
    "leading zero": empty("[00]"),
    "brackets in a name": f'{{"{"[{" * 200}\\"":{{{ZERO}}}}}',
    "missing dtype": '{"a":{"shape":[0],"data_offsets":[0,0]}}',
    "missing shape": '{"a":{"dtype":"U8","data_offsets":[0,0]}}',
    "missing offsets": '{"a":{"dtype":"U8","shape":[0]}}',
    "null tensor": '{"a":null}',
    "tensor as a list": '{"a":["U8",[0],[0,0]]}',
    "dtype as an object": '{"a":{"dtype":{"U8":null},"shape":[0],"data_offsets":[0,0]}}',
    "dtype as a list": '{"a":{"dtype":["U8"],"shape":[0],"data_offsets":[0,0]}}',
    "dtype of lower case": '{"a":{"dtype":"u8","shape":[0],"data_offsets":[0,0]}}',
    "unknown dtype": '{"a":{"dtype":"C128","shape":[0],"data_offsets":[0,0]}}',
    "dtype that torch lacks": '{"a":{"dtype":"F6_E2M3","shape":[0],"data_offsets":[0,0]}}',
    "shape of -0": empty("[-0]"),
    "negative shape": empty("[-1,0]"),
    "shape of floats": empty("[0.0]"),
    "shape of truths": empty("[false]"),
    "shape of text": empty('["0"]'),
    "shape as an object": empty("{}"),
    "many dimensions": empty(f"[0{',1' * 999}]"),
    "huge shape": empty("[18446744073709551616]"),
    "huge empty shape": empty("[0,18446744073709551616]"),
    "large empty shape": empty("[0,9223372036854775807]"),
    "larger empty shape": empty("[0,9223372036854775808]"),
    "overflow": empty("[4294967296,4294967296,0]"),
    "overflow to the right size": empty("[2305843009213693952]", "F64"),
    "overflow behind nothing": empty("[0,4294967296,4294967296]"),
    "three offsets": '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0,0]}}',
    "one offset": '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0]}}',
    "offsets as floats": '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0.0,0.0]}}',
    "negative offsets": '{"a":{"dtype":"U8","shape":[0],"data_offsets":[-1,-1]}}',
    "backward offsets": '{"a":{"dtype":"U8","shape":[0],"data_offsets":[1,0]}}',
    "beyond the end": '{"a":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}',
    "huge offsets": f'{{"a":{{"dtype":"U8","shape":[0],"data_offsets":[{1 << 64},{1 << 64}]}}}}',
    "missing byte": f'{{"a":{{{BYTE}}}}}',
    "half a byte": '{"a":{"dtype":"F4","shape":[],"data_offsets":[0,0]}}',
    "half of a float4 pair": '{"a":{"dtype":"F4","shape":[0,1],"data_offsets":[0,0]}}',
    "field twice": f'{{"a":{{"dtype":"U8",{ZERO}}}}}',
    "more keys, twice": f'{{"a":{{{ZERO},"x":1,"x":2}}}}',
    "name twice": f'{{"a":{{{ZERO}}},"a":{{{ZERO}}}}}',
    "name twice, by an escape": f'{{"a":{{{ZERO}}},"\\u0061":{{{ZERO}}}}}',
    "metadata": '{"__metadata__":{"a":"b"}}',
    "empty metadata": '{"__metadata__":{}}',
    "no metadata": '{"__metadata__":null}',
    "metadata twice": '{"__metadata__":{},"__metadata__":{}}',
    "metadata key twice": '{"__metadata__":{"a":"b","a":"c"}}',
    "metadata of null": '{"__metadata__":{"a":null}}',
    "metadata of numbers": '{"__metadata__":{"a":1}}',
    "metadata as a list": '{"__metadata__":[]}',
    "metadata as an empty text": '{"__metadata__":""}',
    "metadata as zero": '{"__metadata__":0}',
    "metadata as false": '{"__metadata__":false}',
    "metadata as a tensor": f'{{"__metadata__":{{{ZERO}}}}}',
    "metadata with a lone surrogate": '{"__metadata__":{"a":"\\ud800"}}',
    **{
        f"{n} levels": f'{{"a":{{{ZERO},"x":{"[" * (n - 2)}{"]" * (n - 2)}}}}}'
        for n in (126, 127, 128, 129, 100_000)
    },
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_is_read_or_refused_as_by_the_library(what: str, tmp_path: Path) -> None:
    content = framed(HEADERS[what].encode())
    assert_like_the_library(content, tmp_path / "x.safetensors")
    assert_like_the_library(content + b"\0", tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\2\0\0\0\0\0\0",
        b"\0\0\0\0\0\0\0\0",
        b"\3\0\0\0\0\0\0\0{}",
        b"\xff\xff\xff\xff\xff\xff\xff\xff{}",
        framed(b'{"\xff":1}'),
        framed(b'{"\xed\xa0\x80":1}'),
    ],
)
def test_a_broken_frame_is_refused_as_by_the_library(content: bytes, tmp_path: Path) -> None:
    assert_like_the_library(content, tmp_path / "x.safetensors")
    with pytest.raises(CorruptError):
        read(content)


@pytest.mark.slow
@pytest.mark.parametrize(("nbytes", "read"), [(100_000_000, True), (100_000_001, False)])
def test_a_header_has_a_longest(nbytes: int, read: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(framed(b"{}".ljust(nbytes)))
    assert opens(path) is read
    with File.open(path) as source:
        if read:
            assert read_header(source).entries == {}
        else:
            with pytest.raises(CorruptError, match="claims 100,000,001 bytes; the maximum is"):
                read_header(source)


def test_nothing_is_read_of_what_a_length_only_claims(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((99_999_999).to_bytes(8, "little") + b"{")
    with File.open(path) as source, pytest.raises(CorruptError, match="and 1 are there"):
        read_header(source)


def test_depth_is_refused_before_anything_recurses() -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1 << 30)  # so that recursion would end the process
    try:
        for text in ('{"a":' * 1_000_000, "[" * 5_000_000, '["]]]",' * 1_000_000):
            with pytest.raises(CorruptError, match="nested more than 127 levels"):
                read(framed(text.encode()))
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("text", ['{"a":[' + "[]," * 1_000_000, "{}" * 1_000_000])
def test_brackets_are_counted_before_they_take_memory(text: str) -> None:
    with pytest.raises(CorruptError, match="too many brackets"):
        read(framed(text.encode()))


@pytest.mark.slow
def test_tensors_are_counted_before_they_take_memory() -> None:
    """A file of small tensors with usual names is read, and one of shorter ones isn't."""
    for name, is_read in (("layers.{}.weight", True), ("{}", False)):
        tensors = [TensorToWrite(name.format(n), "uint8", (1,), 1) for n in range(100_000)]
        if not is_read:
            with pytest.raises(RefusedError, match="would not be read again"):
                lay_out(tensors)
            said = {t.name: {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]}
                    for n, t in enumerate(tensors)}  # fmt: skip
            with pytest.raises(CorruptError, match="as for 100,000 tensors"):
                read(framed(json.dumps(said, separators=(",", ":")).encode(), bytes(100_000)))
            continue
        laid = lay_out(tensors)
        assert len(read(laid.head + bytes(100_000)).entries) == 100_000


@pytest.mark.parametrize("content", ['"%x":"",', '"%d":"x",'])
def test_texts_are_counted_before_they_take_memory(content: str) -> None:
    said = "".join(content % n for n in range(200_000))
    with pytest.raises(CorruptError, match="too many strings"):
        read(framed(f'{{"__metadata__":{{{said}"a":"a"}}}}'.encode()))


def test_brackets_in_names_are_no_brackets() -> None:
    name = '[{"\\' * 500_000
    made = lay_out([TensorToWrite(name, "int8", (0,), 0), TensorToWrite("w", "int8", (0,), 0)])
    assert list(read(made.head).entries) == [name, "w"]


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (f'{{"a":{{{ZERO}}},"w":1}}', 0, "the tensor 'w' is no object"),
        ('{"w":{"dtype":"X"}}', 0, "the tensor 'w' has no known dtype"),
        ('{"w":{"dtype":"U8","shape":1}}', 0, "the tensor 'w' has no proper shape"),
        ('{"w":{"dtype":"U8","shape":[]}}', 0, "the tensor 'w' has no proper data_offsets"),
        (f'{{"w":{{{BYTE}}}}}', 0, "its tensors end at 62, and the file at 61: it is truncated"),
        (f'{{"w":{{{BYTE}}}}}', 3, "2 bytes follow the last tensor"),
        (f'{{"a":{{{BYTE}}},"w":{{{BYTE}}}}}', 1, "the tensor 'w' overlaps the one before it"),
        (
            '{"w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
            2,
            "the tensor 'w' leaves a gap before it",
        ),
        (
            '{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,20]}}',
            20,
            "the tensor 'w' is 24 bytes long, and its data_offsets are 0 and 20",
        ),
        ('{"w":{},"w":{}}', 0, "its header says 'w' twice"),
        ('{"' + "w" * 1000 + '":1}', 0, "the tensor '" + "w" * 100 + "'… is no object"),
        ('{"\\n":1}', 0, "the tensor '\\n' is no object"),
    ],
)
def test_a_fault_is_named(header: str, data: int, message: str) -> None:
    with pytest.raises(CorruptError) as raised:
        read(framed(header.encode(), bytes(data)))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_dtypes_that_torch_lacks_are_unsupported(dtype: str) -> None:
    header = f'{{"w":{{"dtype":"{dtype}","shape":[4],"data_offsets":[0,3]}}}}'
    with pytest.raises(
        UnsupportedError, match=f"the tensor 'w' is of the dtype {dtype}, which torch does not have"
    ):
        read(framed(header.encode(), bytes(3)))


# -- real headers, broken at random ----------------------------------------------------------------

ODD: list[Json] = [0, 1, -1, 2**63, 2**64, 0.5, True, None, "", "F32", "F4", "F6_E2M3", [], {}, [0]]


@st.composite
def broken(draw: st.DrawFn) -> bytes:
    """A file of the library's, with one thing wrong in its header or around it."""
    made = lay_out(sized(draw(state_dicts())), draw(METADATA))
    content = made.head + bytes(made.nbytes - len(made.head))
    return draw(st.sampled_from(BREAKERS))(draw, content)


def _bytes_changed(draw: st.DrawFn, content: bytes) -> bytes:
    """A few bytes of the header are others, or gone, or new; its length says so."""
    text, data = content[8 : 8 + content[0] + 256 * content[1]], content[8:]
    data = data[len(text) :]
    for _ in range(draw(st.integers(1, 3))):
        at, gone = draw(st.integers(0, len(text))), draw(st.integers(0, 2))
        new = draw(st.binary(max_size=1) | st.sampled_from([b'"', b"{", b"[", b",", b"0", b"\\u"]))
        text = text[:at] + new + text[at + gone :]
    return framed(text, data)


def _value_changed(draw: st.DrawFn, content: bytes) -> bytes:
    """A value somewhere in the header is another."""
    root, data = said(content)
    places: list[tuple[Json, Json]] = []
    todo = [root]
    while todo:
        node = todo.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        places += [(node, key) for key in keys]
        todo += [node[key] for key in keys if isinstance(node[key], (dict, list))]
    if places:
        node, key = draw(st.sampled_from(places))
        near = [node[key] + 1, max(0, node[key] - 1)] if type(node[key]) is int else []
        node[key] = draw(st.sampled_from([*ODD, *near]))
    return framed(json.dumps(root, ensure_ascii=draw(st.booleans())).encode(), data)


def _data_changed(draw: st.DrawFn, content: bytes) -> bytes:
    """The file is longer or shorter."""
    cut = draw(st.integers(0, 16))
    return content + bytes(cut) if draw(st.booleans()) else content[: max(0, len(content) - cut)]


def _length_changed(draw: st.DrawFn, content: bytes) -> bytes:
    """The length is another."""
    length = int.from_bytes(content[:8], "little") + draw(st.integers(-9, 9))
    return max(0, length).to_bytes(8, "little") + content[8:]


def _reordered(draw: st.DrawFn, content: bytes) -> bytes:
    """The header says the same in another order, and with other white space."""
    root, data = said(content)
    order = draw(st.permutations(list(root)))
    shuffled = {name: dict(draw(st.permutations(list(root[name].items())))) for name in order}
    text = json.dumps(shuffled, indent=draw(st.none() | st.integers(0, 2)))
    return framed(text.encode(), data)


BREAKERS: list[Callable[[st.DrawFn, bytes], bytes]] = [
    _bytes_changed,
    _value_changed,
    _data_changed,
    _length_changed,
    _reordered,
]


@settings(parent=FILE_SETTINGS, max_examples=examples(500))
@given(content=broken())
def test_a_broken_header_is_refused_when_the_library_refuses_it(
    content: bytes, tmp_path: Path
) -> None:
    assert_like_the_library(content, tmp_path / "x.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "optimizer.state."])
def test_many_scalars_of_the_library_pass(prefix: str) -> None:
    """However short their names."""
    one = np.zeros((), np.int8)
    data = save({f"{prefix}{n:x}": one for n in range(60_000)})
    assert len(read_header(Memory(data, "x")).entries) == 60_000
