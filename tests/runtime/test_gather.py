"""gathered(): what torch makes of the same view of the same bytes, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import ckptmove
from ckptmove.errors import CorruptError, UnsupportedError
from ckptmove.manifest.dtypes import BITS, nbytes_of
from ckptmove.plans.plan import Gather
from ckptmove.runtime import bfloat16, strided
from ckptmove.runtime import gather as gather_module
from ckptmove.runtime.gather import gather_chunks
from ckptmove.sources.file import File
from tests.whole.test_memory import PROJECT

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

FLOATS = ("float64", "float32", "float16", "bfloat16")
COMPLEX = ("complex128", "complex64", "complex32")
INTEGERS = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")
SIGNED = ("int64", "int32", "int16", "int8", "uint8")
UNCOPYABLE = ("qint32", "qint8", "quint8", "bits16", "int4")
DTYPES = (*FLOATS, *COMPLEX, *INTEGERS, "bool", "float8_e4m3fn", "float8_e5m2", *UNCOPYABLE)


def taken(path: Path, gather: Gather) -> bytes:
    """All of what a gather gives."""
    with File.open(path) as source:
        return b"".join(gather_chunks(source, gather))


def gather_of(
    dtype: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int = 0,
    *,
    source_at: int = 0,
    source_nbytes: int,
    to: str | None = None,
    conj: bool = False,
    neg: bool = False,
    big_endian: bool = False,
) -> Gather:
    """A gather of the first source, to the start of the destination."""
    nbytes = nbytes_of(prod(shape), to or dtype)
    where = (0, nbytes, 0, source_at, source_nbytes)
    return Gather(*where, dtype, shape, stride, offset, conj, neg, big_endian, to)


def tensor_of(content: bytes, gather: Gather) -> torch.Tensor:
    """The whole storage, loaded, as the tensor that the gather means."""
    storage = storage_of(content)
    dtype = getattr(torch, gather.dtype)
    if gather.big_endian and dtype.itemsize > 1:
        storage = storage[: len(content) // dtype.itemsize * dtype.itemsize].clone()
        storage.untyped_storage().byteswap(dtype)
    if gather.dtype in UNCOPYABLE:  # by torch, as such
        dtype = {4: torch.int32, 2: torch.int16, 1: torch.int8}[dtype.itemsize]
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(storage.untyped_storage(), gather.offset, gather.shape, gather.stride)
    tensor = tensor.conj() if gather.conj else tensor
    tensor = torch._neg_view(tensor) if gather.neg else tensor
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.to(getattr(torch, gather.to)) if gather.to else tensor


def storage_of(content: bytes) -> torch.Tensor:
    """A copy, of which torch may be the owner."""
    return torch.tensor(list(content), dtype=torch.uint8)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of its elements, in row-major order."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1)
    return bytes(dense.view(torch.uint8).tolist()) if dense.numel() else b""


@st.composite
def views(draw: st.DrawFn, dtypes: tuple[str, ...]) -> tuple[bytes, Gather]:
    """A file's bytes, and a view of a region in it: any strides, aligned or not."""
    dtype = draw(st.sampled_from(dtypes))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=5)))
    stride = tuple(draw(st.integers(0, 9)) for _ in shape)
    if draw(st.booleans()):  # of dense tensors, permuted
        dense = [prod(shape[n + 1 :]) for n in range(len(shape))]
        order = draw(st.permutations(range(len(shape))))
        shape, stride = tuple(shape[n] for n in order), tuple(dense[n] for n in order)
    offset = draw(st.integers(0, 4))
    reach = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1
    nbytes = max(0, reach) * (BITS[dtype] // 8) + draw(st.integers(0, 9))
    before = draw(st.sampled_from((0, 1, 2, 4, 8, 64, 5000)))
    seed = draw(st.integers(0, 1 << 16))
    content = torch.randint(
        256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    if dtype == "bool":
        content &= 1
    gather = gather_of(dtype, shape, stride, offset, source_at=before, source_nbytes=nbytes)
    return bytes(content.tolist()), gather


def small_chunks(patch: pytest.MonkeyPatch, draw: int) -> None:
    """Have even small views be cut."""
    patch.setattr(strided, "_PICKED_NBYTES", draw)
    patch.setattr(gather_module, "_READ_NBYTES", draw // 16 * 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gather")


def assert_as_torch(folder: Path, content: bytes, gather: Gather, chunk: int) -> None:
    """A file with these bytes in the gather's region gives what torch makes of them."""
    path = folder / "source"
    path.write_bytes(b"\xff" * gather.source_at + content + b"\xff")
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, chunk)
        assert taken(path, gather) == raw(tensor_of(content, gather))


@given(views(DTYPES), st.booleans(), st.integers(16, 200))
def test_bits_are_kept(
    folder: Path, view: tuple[bytes, Gather], big_endian: bool, chunk: int
) -> None:
    content, gather = view
    assume(not big_endian or gather.dtype not in ("qint32", "bits16"))  # torch can't swap them
    assert_as_torch(folder, content, gather._replace(big_endian=big_endian), chunk)


@given(views(COMPLEX), st.booleans(), st.booleans(), st.booleans(), st.integers(16, 200))
def test_conj_and_neg_are_resolved(
    folder: Path,
    view: tuple[bytes, Gather],
    conj: bool,
    neg: bool,
    big_endian: bool,
    chunk: int,
) -> None:
    content, gather = view
    assume(not (conj and neg and gather.dtype == "complex32"))  # torch can't do both
    content = without_nan(content, gather.dtype, big_endian)
    gather = gather._replace(conj=conj, neg=neg, big_endian=big_endian)
    assert_as_torch(folder, content, gather, chunk)


@given(views((*FLOATS, *SIGNED)), st.integers(16, 200))
def test_neg_is_resolved(folder: Path, view: tuple[bytes, Gather], chunk: int) -> None:
    content, gather = view
    content = without_nan(content, gather.dtype, False)
    assert_as_torch(folder, content, gather._replace(neg=True), chunk)


def without_nan(content: bytes, dtype: str, big_endian: bool) -> bytes:
    """With ones for NaNs, which torch negates one way in vectors and another outside of them."""
    whole = len(content) // (BITS[dtype] // 8) * (BITS[dtype] // 8)
    if dtype in INTEGERS or not whole:
        return content
    values = storage_of(content[:whole])
    numbers = values.view(getattr(torch, dtype))
    if big_endian:
        values.untyped_storage().byteswap(numbers.dtype)
    parts = torch.view_as_real(numbers) if dtype in COMPLEX else numbers
    parts[parts.isnan()] = 1
    if big_endian:
        values.untyped_storage().byteswap(numbers.dtype)
    return bytes(values.tolist()) + content[whole:]


CASTS = [
    *((one, other) for one in FLOATS for other in (*FLOATS, "float8_e4m3fn", "complex64")),
    *((one, other) for one in COMPLEX for other in COMPLEX),
    *((one, other) for one in (*INTEGERS, "bool") for other in (*FLOATS, "int64", "bool")),
    ("float8_e4m3fn", "float32"),
    ("float8_e5m2", "bfloat16"),
]


@given(st.data(), st.sampled_from(CASTS), st.booleans(), st.integers(16, 200))
def test_casts_round_as_torch_does(
    folder: Path, data: st.DataObject, cast: tuple[str, str], big_endian: bool, chunk: int
) -> None:
    content, gather = data.draw(views((cast[0],)))
    content = content if cast[0] == "bool" else without_nan8(content, cast[0], big_endian)
    size = nbytes_of(prod(gather.shape), cast[1])
    gather = gather._replace(to=cast[1], nbytes=size, big_endian=big_endian)
    assert_as_torch(folder, content, gather, chunk)


def without_nan8(content: bytes, dtype: str, big_endian: bool) -> bytes:
    """As `without_nan`; bytes that are floats have few, which cast one way only."""
    return content if dtype.startswith("float8") else without_nan(content, dtype, big_endian)


def test_bfloat16_is_cast_without_torch_as_by_torch() -> None:
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper[:, None] + lower).reshape(-1).to(torch.uint32).view(torch.int32)
    numbers = bits.view(torch.float32)
    got = torch.frombuffer(bfloat16.to_bfloat16(bytearray(raw(bits))), dtype=torch.bfloat16)
    is_nan = numbers.isnan()
    assert torch.equal(
        got.view(torch.int16)[~is_nan], numbers.to(torch.bfloat16).view(torch.int16)[~is_nan]
    )
    assert got[is_nan].isnan().all()
    assert torch.equal(got[is_nan].signbit(), numbers[is_nan].signbit())
    every = (upper >> 16).to(torch.uint16).view(torch.int16)
    back = torch.frombuffer(bfloat16.from_bfloat16(bytearray(raw(every))), dtype=torch.int32)
    assert torch.equal(back, every.to(torch.int32) << 16)


def test_bfloat16_is_cast_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.write_bytes(raw(torch.arange(8.0)))
    script = f"""
import sys
from ckptmove.plans.plan import Gather
from ckptmove.runtime.gather import gather_chunks
from ckptmove.sources.file import File
with File.open({str(path)!r}) as source:
    gather = Gather(0, 16, 0, 0, 32, "float32", (2, 4), (4, 1), 0, to="bfloat16")
    sys.stdout.buffer.write(b"".join(gather_chunks(source, gather)))
assert "torch" not in sys.modules
"""
    made = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, check=True, stdout=-1)
    assert made.stdout == raw(torch.arange(8.0).to(torch.bfloat16))


@pytest.mark.parametrize("big_endian", [False, True])
def test_nan_is_cast_alike_wherever_it_lies(tmp_path: Path, big_endian: bool) -> None:
    bits = torch.tensor([0x7F800001, -1, 0x7FC12345, 0x3F800000] * 10, dtype=torch.int32)
    path = tmp_path / "source"
    path.write_bytes(raw(bits))
    dense = taken(path, gather_of("float32", (40,), (1,), source_nbytes=160, to="bfloat16"))
    assert dense == b"\xc0\x7f\xff\xff\xc1\x7f\x80\x3f" * 10
    if big_endian:
        bits.untyped_storage().byteswap(torch.int32)
        path.write_bytes(raw(bits))
    shape, stride = ((40,), (1,)) if big_endian else ((4, 10), (1, 4))
    made = taken(
        path,
        gather_of(
            "float32", shape, stride, source_nbytes=160, to="bfloat16", big_endian=big_endian
        ),
    )
    elements = torch.frombuffer(bytearray(dense), dtype=torch.int16)
    assert made == raw(elements if big_endian else elements.view(10, 4).t().contiguous())


def test_nan_payloads_and_minus_zero_are_kept(tmp_path: Path) -> None:
    bits = torch.tensor([0x7F800001, -0x80000000, 0x7FC12345, -1], dtype=torch.int32)
    path = tmp_path / "source"
    path.write_bytes(raw(bits))
    got = taken(path, gather_of("float32", (2, 2), (1, 2), source_nbytes=16))
    assert got == raw(bits[[0, 2, 1, 3]])
    turned = taken(path, gather_of("float32", (2, 2), (1, 2), neg=True, source_nbytes=16))
    assert turned == raw(bits[[0, 2, 1, 3]] ^ -0x80000000)


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        pytest.param((3, 1 << 20), (1, 3), id="transposed"),
        pytest.param((1 << 20, 3), (1, 1 << 20), id="transposed, short rows"),
        pytest.param((2, 3 << 19), (0, 2), id="expanded, rows longer than a chunk"),
        pytest.param((1000, 3000), (3000, 1), id="dense"),
        pytest.param((7, 2, 300, 700), (0, 700, 1400, 1), id="four dimensions"),
        pytest.param((3 << 20,), (0,), id="one element, repeated"),
    ],
)
def test_large_views_come_in_chunks(
    tmp_path: Path, shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    numbers = torch.arange(3 << 20, dtype=torch.float64)
    path = tmp_path / "source"
    torch.save(numbers, path, _use_new_zipfile_serialization=False)
    nbytes = numbers.nbytes
    at = path.stat().st_size - nbytes
    gather = gather_of("float64", shape, stride, source_at=at, source_nbytes=nbytes)
    with File.open(path) as source:
        chunks = list(gather_chunks(source, gather))
    assert max(map(len, chunks)) <= 8 << 20
    assert len(chunks) <= 4 * len(b"".join(chunks)) // (1 << 20) + 1
    joined = torch.frombuffer(bytearray(b"".join(chunks)), dtype=torch.float64)
    assert torch.equal(joined, numbers.as_strided(shape, stride).reshape(-1))


@pytest.mark.parametrize("dtype", ["quint4x2", "quint2x4"])
def test_elements_that_share_bytes(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "source"
    path.write_bytes(bytes(range(16)))
    assert taken(path, gather_of(dtype, (3, 3), (3, 1), source_nbytes=16)) == bytes(
        range(nbytes_of(9, dtype))
    )
    after = taken(path, gather_of(dtype, (5,), (1,), 8, source_nbytes=16))
    assert after == bytes(range(16))[BITS[dtype] :][: nbytes_of(5, dtype)]
    for odd in (
        gather_of(dtype, (5,), (1,), 1, source_nbytes=16),
        gather_of(dtype, (2, 2), (1, 2), source_nbytes=16),
        gather_of(dtype, (5,), (2,), source_nbytes=16),
        gather_of(dtype, (5,), (1,), to="float32", source_nbytes=16),
    ):
        with pytest.raises(UnsupportedError):
            taken(path, odd)


@pytest.mark.parametrize(
    "gather",
    [
        gather_of("float32", (4,), (1,), 1, source_nbytes=16),
        gather_of("float32", (4, 2), (1, 4), source_nbytes=28),
        gather_of("float32", (2,), (1 << 62,), source_nbytes=16),
        gather_of("float32", (), (), 4, source_nbytes=16),
        gather_of("float32", (2,), (-1,), 1, source_nbytes=16),
        gather_of("float32", (2,), (1,), -1, source_nbytes=16),
        gather_of("float32", (4,), (1,), source_at=1, source_nbytes=16),
        gather_of("float32", (4,), (1,), source_at=-16, source_nbytes=16),
        gather_of("float32", (4,), (1,), source_nbytes=16, conj=True),
    ],
    ids=lambda gather: f"{gather.shape}-{gather.stride}-{gather.offset}-{gather.source_at}",
)
def test_what_makes_no_sense_is_an_error(tmp_path: Path, gather: Gather) -> None:
    path = tmp_path / "source"
    path.write_bytes(bytes(16))
    with File.open(path) as source, pytest.raises(CorruptError):
        gather_chunks(source, gather)  # before anything is read


@pytest.mark.parametrize(
    ("dtype", "to"), [("complex64", "float32"), ("qint8", "float32"), ("float32", "int4")]
)
def test_casts_that_torch_can_not_do(tmp_path: Path, dtype: str, to: str) -> None:
    path = tmp_path / "source"
    path.write_bytes(bytes(16))
    gather = gather_of(dtype, (), (), source_nbytes=16)._replace(to=to, nbytes=nbytes_of(1, to))
    with File.open(path) as source, pytest.raises(UnsupportedError):
        gather_chunks(source, gather)


@pytest.mark.parametrize("stride", [(1,), (2,)], ids=["dense", "strided"])
def test_a_file_that_shrinks_is_an_error(tmp_path: Path, stride: tuple[int, ...]) -> None:
    path = tmp_path / "source"
    path.write_bytes(bytes(64 << 20))
    gather = gather_of("float32", (4 << 20,), stride, source_nbytes=64 << 20)
    with File.open(path) as source:
        chunks = gather_chunks(source, gather)
        next(chunks)
        with path.open("r+b") as file:
            file.truncate(100)
        with pytest.raises(CorruptError):
            list(chunks)


GROWTH = """
import sys
from pathlib import Path
from ckptmove.plans.plan import Gather
from ckptmove.runtime.gather import gather_chunks
from ckptmove.sources.file import File

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

n = 1 << 13
with File.open(sys.argv[1]) as source:
    for shape, stride, to in (
        ((n, n), (n, 1), "bfloat16"), ((n, n), (1, n), None), ((n, n), (1, n), "float64"),
        ((2, n, n), (0, n, 1), None),
    ):
        nbytes = 4 * n * n * (shape[0] // n or 2) * {"bfloat16": 1, None: 2, "float64": 4}[to] // 2
        gather = Gather(0, nbytes, 0, 0, 4 * n * n, "float32", shape, stride, 0, to=to)
        chunks = gather_chunks(source, gather)
        next(chunks)
        before, most = anonymous(), 0
        for chunk in chunks:
            most = max(most, anonymous())
        print(most - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is told by Linux only")
def test_memory_does_not_grow_with_the_view(tmp_path: Path) -> None:
    path = tmp_path / "source"
    with path.open("wb") as file:
        file.truncate(4 << 26)  # 256 MiB
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", GROWTH, path],
        cwd=PROJECT,
        check=True,
        capture_output=True,
        text=True,
    )
    growths = [int(line) for line in done.stdout.split()]
    assert len(growths) == 4
    assert max(growths) < 40_000_000, growths


def test_importing_ckptmove_leaves_the_rooms_shut() -> None:
    script = "import sys, ckptmove; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-c", script], check=True, cwd=Path(ckptmove.__file__).parents[1]
    )
