"""What fuzzing and thinking found: small files that took too long, too much, or a wrong exception.

Each is about 100 kB at most, and must be read, shown and relocated, or refused, within the bounds.
"""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove.errors import CkptmoveError
from tests.making.building import Part, build_zip
from tests.making.legacy import save_legacy
from tests.oracles.bounds import do_everything

SECONDS = 4  # of processor time, half a second of which is to start
ROOM = 256 << 20  # bytes
LONG = 50_000  # characters of what is named again and again

START = b"\x80\x02"


def text(value: str | bytes) -> bytes:
    """Push a string."""
    raw = value.encode() if isinstance(value, str) else value
    return b"X" + struct.pack("<I", len(raw)) + raw


def long1(value: int, width: int) -> bytes:
    """Push a number."""
    return b"\x8a" + bytes([width]) + value.to_bytes(width, "little")


def pid(key: str = "0", location: str = "cuda:1") -> bytes:
    """Push a storage's id."""
    named = text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text(location)
    return b"(" + named + b"K\x04t"


#: Push a tensor.
TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid() + b"QK\x00))\x89ccollections\nOrderedDict\n)RtR"
)


def checkpoint(pickle: bytes, *more: Part, method: int = 0) -> bytes:
    """A file of torch.save around a pickle."""
    parts = [
        Part("a/data.pkl", START + pickle, method),
        *(Part("a/data/0", bytes(16)), Part("a/version", b"3\n")),
        *more,
    ]
    return build_zip(parts)


def script(code: str) -> bytes:
    """A TorchScript archive with that code, after a line that names a device."""
    constants = Part("a/constants.pkl", START + b").")
    named = f"x = 'cuda:0'\n{code}".encode()
    return checkpoint(b"}.", constants, Part("a/code/__torch__.py", named))


def deep(inner: bytes, start: bytes = b"", depth: int = 980) -> bytes:
    """Many things in a list that lies within many lists."""
    return checkpoint(start + b"]" * depth + b"(" + inner + b"e" + b"a" * (depth - 1) + b".")


def groups(group: bytes, times: int) -> bytes:
    """An optimizer that has one group again and again."""
    fields = text("state") + b"}" + text("param_groups")
    return checkpoint(
        TENSOR + b"q\x010}(" + fields + b"](" + group + b"q\x02" + b"h\x02" * times + b"eu."
    )


def nested_tensor(*sizes: int) -> bytes:
    """A nested tensor whose sizes are a tensor of that shape, without data."""
    shape = b"(" + b"".join(long1(n, 6) for n in sizes) + b"t"
    meta = b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nint64\n" + shape + b")\x89tR"
    return checkpoint(b"ctorch._utils\n_rebuild_nested_tensor\n(" + TENSOR + meta + b"NNtR.")


def encoded(content: bytes, times: int) -> bytes:
    """A pickle that decodes the same text again and again."""
    held = text(content.decode("latin-1"))
    start = START + b"c_codecs\nencode\nq\x010" + held + b"q\x020" + text("latin1") + b"q\x030]("
    return start + b"h\x01h\x02h\x03\x86R" * times + b"e."


def encoded_within(levels: int, times: int) -> bytes:
    """The same, within each other."""
    data = START + b"](" + b"N" * 40 + b"e."
    for _ in range(levels):
        data = encoded(data, times)
    return data


NAME = text("x" * LONG) + b"q\x010"  # in slot 1
MERSENNE = (1 << 61) - 1  # by which Python takes the remainder of a number that it hashes

FINDINGS: dict[str, Callable[[], bytes]] = {
    # exceptions
    "a slot beyond 64 bits": lambda: checkpoint(TENSOR + b"p18446744073709551616\n."),
    "a nested tensor of 2^40 dimensions": lambda: nested_tensor(0, 1 << 40),
    "a nested tensor of 2^26 dimensions": lambda: nested_tensor(0, 1 << 26),
    "code of a thousand signs": lambda: script('f"{' + "-" * 50_000 + '1}"'),
    "a string of Python 2 with a wrong escape": lambda: START[:0] + b"](S'\\d'\nS'b'\ne.",
    "code with a wrong escape": lambda: script("y = '\\d'\n"),
    "a string that is recalled and memoised again": lambda: checkpoint(
        b"]("
        + text("cuda:1")
        + b"q\x010("
        + text("storage")
        + b"ctorch\nFloatStorage\n"
        + text("0")
        + b"h\x01q\x02K\x04tQh\x02e."
    ),
    # time
    "code of quotes that stay open": lambda: script("\\'" * 50_000),
    "one group of many parameters, often": lambda: groups(
        b"}(" + text("capturable") + b"\x88" + text("params") + b"](" + b"K\x01" * 25_000 + b"eu",
        25_000,
    ),
    "one group of many tensors, often": lambda: groups(
        b"}(" + text("lrs") + b"](" + b"h\x01" * 8_000 + b"eu", 8_000
    ),
    "one state of equal keys, often": lambda: checkpoint(
        text("k")
        + b"q\x010ca\nb\nq\x030}q\x02("
        + b"h\x01N" * 17_000
        + b"u0]("
        + b"h\x03)Rh\x02b" * 6_000
        + b"e."
    ),
    "one deep tensor, often": lambda: deep(b"h\x01" * 50_000, TENSOR + b"q\x010"),
    "one deep string, often": lambda: deep(b"h\x01" * 50_000, text("cuda:0") + b"q\x010"),
    "one deep list, often": lambda: deep(b"h\x02" * 50_000, TENSOR + b"q\x010]q\x02h\x01a0"),
    "deep composites": lambda: deep(
        b"ctorch._utils\n_rebuild_sparse_csr_tensor\nh\x02\x85R" * 2_000,
        TENSOR + b"q\x010(h\x01h\x01h\x01)tq\x020",
    ),
    "texts decoded within each other": lambda: encoded_within(8, 4),
    "one text decoded often": lambda: encoded(START + b"](" + b"N" * 50_000 + b"e.", 6_000),
    "a long name called often": lambda: checkpoint(
        NAME + b"h\x01h\x01\x93q\x020](" + b"h\x02)R" * 12_000 + b"e."
    ),
    "numbers of one hash as keys": lambda: checkpoint(
        b"}(" + b"".join(long1(MERSENNE * n, 10) + b"N" for n in range(1, 20_000)) + b"u."
    ),
    # memory
    "deep lists": lambda: deep(b"]" * 100_000),
    "a long name imported often": lambda: checkpoint(
        NAME + b"](" + b"h\x01h\x01\x93" * 10_000 + b"e."
    ),
    "a storage with a long key, often": lambda: checkpoint(
        pid(key="x" * LONG) + b"q\x01Q0](" + b"h\x01Q" * 16_000 + b"e."
    ),
    "a storage with a long location, often": lambda: checkpoint(
        pid(location="x" * LONG) + b"q\x01Q0](" + b"h\x01Q" * 16_000 + b"e."
    ),
    "tensors with a long location": lambda: checkpoint(
        pid(location="x" * LONG)
        + b"Qq\x010ctorch._utils\n_rebuild_tensor_v2\nq\x020]("
        + b"h\x02(h\x01K\x00))\x89NtR" * 3_500
        + b"e."
    ),
    "tensors of a thousand dimensions": lambda: checkpoint(
        b"("
        + b"K\x01" * 1000
        + b"tq\x010"
        + pid()
        + b"Qq\x020ctorch._utils\n_rebuild_tensor_v2\nq\x030]("
        + b"h\x03(h\x02K\x00h\x01h\x01\x89NtR" * 6_000
        + b"e."
    ),
    "many parameters with the same many attributes": lambda: checkpoint(
        TENSOR
        + b"q\x010"
        + text("k")
        + b"q\x050ctorch._utils\n_rebuild_parameter_with_state\nq\x030}q\x02("
        + b"h\x05N" * 17_000
        + b"u0]("
        + b"h\x03(h\x01\x89Nh\x02tR" * 4_000
        + b"e."
    ),
    "a long key in many dicts": lambda: checkpoint(
        TENSOR + b"q\x070" + NAME + b"](h\x07" + b"}h\x01Ns" * 10_000 + b"e."
    ),
    "a long key, often": lambda: checkpoint(
        TENSOR + b"q\x070" + NAME + b"](h\x07}(" + b"h\x01N" * 16_000 + b"ue."
    ),
    "a key that holds a long text, often": lambda: checkpoint(
        NAME + b"h\x01h\x01\x86q\x020}(" + b"h\x02]" * 16_000 + b"u."
    ),
    "a compressed pickle of marks": lambda: checkpoint(b"(" * 20_000_000 + b".", method=8),
    "a compressed pickle of tuples": lambda: checkpoint(
        b")" + b"\x85" * 20_000_000 + b".", method=8
    ),
}


@pytest.mark.sample(2)
@pytest.mark.skipif(sys.platform != "linux", reason="the bound on memory is Linux's")
@pytest.mark.parametrize("what", FINDINGS)
def test_a_finding_is_bounded(what: str, tmp_path: Path) -> None:
    source = tmp_path / "in.pt"
    source.write_bytes(FINDINGS[what]())
    assert source.stat().st_size < 300_000
    said = do_everything(source, seconds=SECONDS, nbytes=ROOM)
    assert said in (0, 3, 4)
    if said:
        assert [each.name for each in tmp_path.iterdir()] == ["in.pt"]


def changed(source: Path) -> tuple[bytes, bytes] | None:
    """The file before and after it went to the CPU; None where that is refused."""
    out, refusal = source.with_name("out"), None
    try:
        ckptmove.relocate(source, out, to="cpu", all=True)
    except CkptmoveError as error:
        refusal = error
    assert refusal is None or refusal.exit_code in (3, 4)
    return None if refusal else (source.read_bytes(), out.read_bytes())


def test_a_text_that_is_also_a_value_stays_what_it_is(tmp_path: Path) -> None:
    """No pickler spells bytes by a text that it uses elsewhere, but a forger may."""
    legacy, source = tmp_path / "legacy.pt", tmp_path / "in.pkl"
    save_legacy({"a": torch.ones(2)}, legacy, "cuda:1")
    held = text(legacy.read_bytes().decode("latin-1")) + b"q\x01" + text("latin1")
    source.write_bytes(START + b"](c_codecs\nencode\n" + held + b"\x86Rh\x01e.")
    found = changed(source)
    if found is not None:
        before, after = map(pickle.loads, found)
        assert before[1] == after[1]


def test_a_location_that_is_also_a_value_stays_what_it_is(tmp_path: Path) -> None:
    """No pickler writes DUP, which gives one string two uses, but a forger may."""
    source = tmp_path / "in.pt"
    named = text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cuda:1")
    source.write_bytes(checkpoint(b"](" + b"(" + named + b"2\x85q\x050K\x04tQh\x05e."))
    if changed(source) is not None:
        files = source, source.with_name("out")
        before, after = (ckptmove.inspect(each).values_naming_devices for each in files)
        assert [each.value for each in before] == [each.value for each in after] == ["cuda:1"]


def test_a_tensor_without_hooks_is_refused_by_dcp_too(tmp_path: Path) -> None:
    """`_rebuild_tensor_v2` takes six arguments; torch could not load it with five."""
    short = TENSOR.replace(b"\x89ccollections\nOrderedDict\n)R", b"\x89")
    (tmp_path / "in.pt").write_bytes(checkpoint(b"}" + text("w") + short + b"s."))
    for name in ("out", "out.pt", "out.safetensors"):
        with pytest.raises(CkptmoveError) as refused:
            ckptmove.convert(
                tmp_path / "in.pt", tmp_path / name, format="dcp" if name == "out" else None
            )
        assert refused.value.exit_code in (3, 4)
    assert [each.name for each in tmp_path.iterdir()] == ["in.pt"]
