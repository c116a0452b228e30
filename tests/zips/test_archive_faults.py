"""The zip reader on files that contradict themselves, field by field."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import torch

from ckptmove.errors import CorruptError, UnsupportedError
from ckptmove.sources.file import File
from ckptmove.zips.archive import Archive
from ckptmove.zips.checking import damage
from tests.making.building import Part, build_zip, extra_field
from tests.zips.test_archive import read_all

ONE, TWO = Part("a/one", b"first" * 20), Part("a/two", b"second" * 20)
HUGE = 1 << 63
LATER = 0x0808  # UTF-8, and the sizes follow in a descriptor
FULL32 = 0xFFFFFFFF


def wide(*values: int) -> bytes:
    """A zip64 extra field."""
    return extra_field(1, struct.pack(f"<{len(values)}Q", *values))


def local(later: bool = False, **fields: int | bytes) -> bytes:
    """A zip whose second local header says something of its own."""
    return build_zip(
        [ONE, Part(TWO.name, TWO.content, flags=LATER if later else 0x800, local=fields)]
    )


def central(**fields: int | bytes) -> bytes:
    """A zip whose second directory entry says something of its own."""
    return build_zip([ONE, Part(TWO.name, TWO.content, central=fields)])


def descriptor(wide: bool = False, **fields: int | bytes) -> bytes:
    """A zip whose second descriptor says something of its own."""
    return build_zip([ONE, Part(TWO.name, TWO.content, 0, LATER, wide=wide, descriptor=fields)])


def quoted() -> bytes:
    """A zip whose second record, header and all, lies within the content of the first."""
    whole = build_zip([TWO])
    inside = whole[: struct.unpack_from("<I", whole, len(whole) - 6)[0]]
    at = 30 + len(ONE.name)
    return build_zip([Part(ONE.name, inside), Part(TWO.name, TWO.content, central={"at": at})])


def reaching_too_far() -> bytes:
    """A zip whose record without a checksum ends within the directory, by its local header."""
    local: dict[str, int | bytes] = {"extra_nbytes": 60, "crc": 0}
    like_a_field = b"BB\x38\0"  # of the 56 bytes that follow
    return build_zip([Part("a", like_a_field, local=local, central={"crc": 0})], comment=b"c" * 99)


def named(*names: str) -> bytes:
    """A zip with these records."""
    return build_zip([Part(name, b"content") for name in names])


CORRUPT: dict[str, bytes] = {
    # the end record
    "a count too low": build_zip([ONE, TWO], end={"here": 1, "entries": 1}),
    "a count too high": build_zip([ONE, TWO], end={"here": 3, "entries": 3}),
    "a count of all": build_zip([ONE, TWO], end={"here": 0xFFFF, "entries": 0xFFFF}),
    "two counts": build_zip([ONE, TWO], end={"here": 1}),
    "another disk": build_zip([ONE, TWO], end={"disk": 1, "first": 1}),
    "a directory too short": build_zip([ONE, TWO], end={"nbytes": 46}),
    "a directory elsewhere": build_zip([ONE, TWO], end={"at": 0}),
    "a directory beyond the file": build_zip([ONE, TWO], end={"at": 1 << 30}),
    "a comment longer than the file": build_zip([ONE, TWO], end={"comment": 1}),
    "bytes before the end record": build_zip([ONE, TWO], before_end=b"x"),
    "an entry's worth before the end record": build_zip([ONE, TWO], before_end=bytes(46)),
    # zip64 end records
    "a locator past the record": build_zip([ONE, TWO], wide=True, locator={"end64_at": 1}),
    "a locator past the file": build_zip([ONE, TWO], wide=True, locator={"end64_at": 1 << 40}),
    "a locator of 2^64 - 1": build_zip([ONE, TWO], wide=True, locator={"end64_at": 2**64 - 1}),
    "a locator on another disk": build_zip([ONE, TWO], wide=True, locator={"disk": 1}),
    "a locator of many disks": build_zip([ONE, TWO], wide=True, locator={"disks": 2}),
    "no zip64 record": build_zip([ONE, TWO], wide=True, end64={"magic": b"PK\6\5"}),
    "a zip64 record of another size": build_zip([ONE, TWO], wide=True, end64={"size": 45}),
    "bytes behind the zip64 record": build_zip([ONE, TWO], wide=True, before_end=b"x"),
    "a zip64 count": build_zip([ONE, TWO], wide=True, end64={"entries": 3, "here": 3}),
    "a zip64 count of its own": build_zip(
        *([ONE, TWO],),
        wide=True,
        end64={"entries": 2**60, "here": 2**60},
        end={"entries": 0xFFFF, "here": 0xFFFF},
    ),
    "a zip64 directory elsewhere": build_zip([ONE, TWO], wide=True, end64={"at": 0}),
    "a zip64 directory size": build_zip([ONE, TWO], wide=True, end64={"nbytes": 2**63}),
    "a zip64 disk": build_zip([ONE, TWO], wide=True, end64={"disk": 1}),
    "a narrow count unlike the zip64 count": build_zip(
        [ONE, TWO], wide=True, end={"here": 1, "entries": 1}
    ),
    "a narrow count of this disk": build_zip([ONE, TWO], wide=True, end={"here": 1}),
    "a narrow offset unlike the zip64 offset": build_zip([ONE, TWO], wide=True, end={"at": 0}),
    # directory entries
    "an entry without its magic": central(magic=b"PK\1\1"),
    "an entry's name beyond the directory": central(name_nbytes=9_999),
    "an entry's name shorter than it is": central(name_nbytes=4),
    "an entry's comment beyond the directory": central(comment=1),
    "an entry on another disk": central(disk=1),
    "an entry longer than its bytes": central(nbytes=121),
    "an entry shorter than its bytes": central(nbytes=119),
    "an entry of more than the file": central(nbytes=1 << 30, stored=1 << 30),
    "an entry at another's place": central(at=0),
    "an entry within another's content": central(at=40),
    "an entry within the directory": central(at=300),
    "an entry quoted by another's content": quoted(),
    "content within the directory": reaching_too_far(),
    "a stored record of two sizes": build_zip(
        [Part("a", b"12", local={"nbytes": 1}, central={"nbytes": 1})]
    ),
    "an entry past the file": central(at=1 << 30),
    "a wide entry without its values": central(nbytes=FULL32, stored=FULL32),
    "a wide entry with too few of them": build_zip(
        [Part("a", b"1", central={"stored": FULL32, "nbytes": FULL32}, extra_central=wide(1))]
    ),
    "a wide entry of 2^63 bytes": build_zip(
        [
            Part(
                "a",
                b"1",
                central={"stored": FULL32, "nbytes": FULL32},
                extra_central=wide(HUGE, HUGE),
            )
        ]
    ),
    "a wide entry at 2^63": build_zip(
        [Part("a", b"1", central={"at": FULL32}, extra_central=wide(HUGE))]
    ),
    "an extra field beyond its room": build_zip([Part("a", b"1", extra_central=b"\1\0\x20\0abc")]),
    "a folder with content": central(outside=0x10),
    "a folder with content, by its name": named("a/b", "a/c/"),
    "a wrong checksum": build_zip([Part("a", b"1", local={"crc": 7}, central={"crc": 7})]),
    # names
    "a name twice": named("a/b", "a/c", "a/b"),
    "a name twice but for its case": named("a/data.pkl", "a/DATA.PKL"),
    "a name twice once folded": named("a/straße", "a/STRASSE"),
    "a name with a NUL": named("a/b\0c"),
    "a name with a NUL at the end": named("a/b\0"),
    # local headers
    "a local header without its magic": local(magic=b"PK\3\3"),
    "another local name": local(name=b"a/TWO"),
    "a shorter local name": local(name=b"a/tw"),
    "a local name with a NUL": local(name=b"a/t\0o"),
    "a local name beyond the file": local(name_nbytes=0xFFFF),
    "a local extra field beyond the directory": local(extra_nbytes=9_999),
    "another local method": local(method=8),
    "another local method, sizes later": local(later=True, method=8),
    "other local flags": local(flags=0),
    "a local flag of a descriptor": local(flags=LATER),
    "a local flag of no descriptor": local(later=True, flags=0x800),
    "another local checksum": local(crc=1),
    "no local checksum": local(crc=0),
    "another local checksum, sizes later": local(later=True, crc=1),
    "another local stored size": local(stored=119),
    "another local size": local(nbytes=119),
    "no local size": local(nbytes=0),
    "another local size, sizes later": local(later=True, nbytes=119),
    "a wide local size without its value": local(stored=FULL32, nbytes=FULL32),
    "a wide local size that lies": build_zip(
        [Part("a", b"1", local={"stored": FULL32, "nbytes": FULL32}, extra=wide(2, 2))]
    ),
    # descriptors
    "no descriptor": descriptor(magic=b"PK\3\4", crc=0, stored=0, nbytes=0),
    "another checksum in the descriptor": descriptor(crc=1),
    "another size in the descriptor": descriptor(nbytes=1),
    "another stored size in the descriptor": descriptor(stored=1),
    "another size in a wide descriptor": descriptor(wide=True, nbytes=2**40),
}
UNSUPPORTED: dict[str, bytes] = {
    **{f"the flag {bit:#x}": central(flags=0x800 | bit) for bit in (1, 0x20, 0x40, 0x2000)},
    **{f"method {n}": central(method=n) for n in (1, 6, 9, 12, 14, 93, 95, 99, 0xFFFF)},
}


@pytest.mark.parametrize("fault", CORRUPT)
def test_a_contradiction_is_corrupt(fault: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CORRUPT[fault])
    with pytest.raises(CorruptError):
        read_all(tmp_path / "a")


@pytest.mark.parametrize("fault", UNSUPPORTED)
def test_what_needs_a_key_or_another_method_is_unsupported(fault: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(UNSUPPORTED[fault])
    with pytest.raises(UnsupportedError):
        read_all(tmp_path / "a")


def test_without_a_fault_the_builder_is_read(tmp_path: Path) -> None:
    """So that each fault above is all that is wrong with its file."""
    both = {"a/one": ONE.content, "a/two": TWO.content}
    for sound in (
        *(build_zip([ONE, TWO]), build_zip([ONE, TWO], wide=True), local(), local(later=True)),
        *(central(), descriptor(), descriptor(wide=True), central(disk=0xFFFF)),
        build_zip([ONE, Part(TWO.name, TWO.content, wide=True)]),
        build_zip([ONE, Part(TWO.name, TWO.content, 8, LATER)]),
        build_zip([ONE, Part(TWO.name, TWO.content, gap=b"a gap")]),
        build_zip([ONE, TWO], wide=True, end={"here": 0xFFFF, "entries": 0xFFFF, "at": FULL32}),
        local(needed=63, time=1, date=1),
        central(made=3, needed=45, time=1, date=1, inside=1, outside=0x81A40020),
    ):
        (tmp_path / "a").write_bytes(sound)
        assert read_all(tmp_path / "a") == both


@pytest.mark.parametrize("letter", [b"Z", b"\0"])
def test_a_flipped_bit_in_what_fills_up_is_found(letter: bytes, tmp_path: Path) -> None:
    """Every letter that torch aligns records with; of other fields, nothing is known."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(5)}, path)
    whole = path.read_bytes()
    filled = [
        n for each in re.finditer(b"FB..(Z+)", whole, re.DOTALL) for n in range(*each.span(1))
    ]
    assert len(filled) > 60
    for n in filled:
        path.write_bytes(whole[:n] + bytes([whole[n] ^ 1]) + whole[n + 1 :])
        assert ["padding before" in each for each in faults(path)] == [True]
    path.write_bytes(whole.replace(b"FB", b"XY").replace(b"Z", letter))
    assert not faults(path)


def faults(path: Path) -> list[str]:
    """What is damaged in a zip."""
    with File.open(path) as source:
        return list(damage(Archive(source), lambda nbytes: None))
