"""What plans of several sources become: each byte as a model in memory has it, or nothing."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings

from ckptmove.errors import CorruptError, RefusedError, WriteError
from ckptmove.plans.plan import Checksum, Copy, CrcRange, Gather, Plan, Write, apply_plan
from ckptmove.runtime import gather as gathering
from ckptmove.writing.final_name import check_file, check_room
from ckptmove.writing.staged_file import LocalFile
from tests.conftest import examples
from tests.making.plans import Case, cases, content, open_sources
from tests.making.staging import Once, leaving_nothing, mounted


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """After each test: as many open files as before, and no temporary file."""
    with leaving_nothing(tmp_path):
        yield


@settings(max_examples=examples(100))
@given(cases())
def test_each_byte_is_as_the_model_has_it(case: Case) -> None:
    steps: list[int] = []
    with TemporaryDirectory() as name, open_sources(Path(name), case.contents) as sources:
        out = Path(name, "out")
        with LocalFile(out, sources, force=False) as staged:
            staged.write(case.plan, steps.append)
            with staged.open_written() as again:
                assert again.read(0, again.nbytes) == case.expected
            assert not out.exists()
            staged.commit()
        assert out.read_bytes() == case.expected
    assert all(step >= 0 for step in steps)
    assert sum(steps) == len(case.expected)


def written(folder: Path, contents: Sequence[bytes], plan: Plan, **options: object) -> bytes:
    """What a plan makes of these contents."""
    act = options.get("meanwhile")
    progress = Once(act) if callable(act) else None
    with (
        open_sources(folder, contents) as sources,
        LocalFile(folder / "out", sources, force=False) as file,
    ):
        file.write(plan, progress)
        file.commit()
    return (folder / "out").read_bytes()


def small_copies(crc32: Callable[[int, bytes], int]) -> Plan:
    """A thousand small copies from all over a source, each after a header that is written."""
    held = content(3, 100_000)
    places = [n * 7919 % 99_900 for n in range(1000)]
    copies = [Copy(at, 72, n * 128 + 50) for n, at in enumerate(places)]
    writes = [Write(n * 128, b"header %4d" % n) for n in range(1000)]
    writes.append(Write(5 * 128 + 60, b"over a copy"))
    sums = [
        Checksum(copy.at, 72, crc32(n, held[copy.source_at : copy.source_at + 72]), f"r{n}", at)
        for n, (copy, at) in enumerate(zip(copies, places, strict=True))
        if n % 2 == 0
    ]
    return Plan("relay", 128_000, tuple(copies), tuple(writes), tuple(sums))


def test_small_copies_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is written among them, in a few calls, and each byte as it should be."""
    plan, calls = small_copies(lambda _, data: zlib.crc32(data)), list[int]()
    write = os.pwrite

    def counted(fd: int, data: bytes, at: int) -> int:
        calls.append(at)
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", counted)
    held = content(3, 100_000)
    assert written(tmp_path, [held], plan) == apply_plan(plan, held)
    assert len(calls) < 10


def test_damage_of_a_small_copy_is_found(tmp_path: Path) -> None:
    plan = small_copies(lambda n, data: zlib.crc32(data) ^ (n == 500))
    with pytest.raises(CorruptError, match="the record 'r500' is damaged"):
        written(tmp_path, [content(3, 100_000)], plan)
    assert not (tmp_path / "out").exists()


def records_of_a_clone(wrong: int) -> Plan:
    """Records of all sizes in one copy; the checksum of one of them is wrong."""
    held, at, sums = content(3, 400_000), 10, list[Checksum]()
    while at < 390_000:
        n = len(sums)
        nbytes = 1 + n * 7919 % (9000 if n % 50 == 0 else 900)
        crc32 = zlib.crc32(held[at : at + nbytes]) ^ (n == wrong)
        sums.append(Checksum(at, nbytes, crc32, f"r{n}", at))
        at += nbytes + n % 60
    return Plan("patch", 400_000, (Copy(0, 400_000, 0),), (Write(3, b"new"),), tuple(sums))


def test_damage_of_any_record_of_a_clone_is_found(tmp_path: Path) -> None:
    """Also of those that lie across the ranges that are read at once."""
    sums = records_of_a_clone(-1).checksums
    across = next(n for n, each in enumerate(sums) if each.at + each.nbytes > 1 << 17)
    for wrong in (across - 1, across, across + 1, 0, len(sums) - 1, 50, 51, 99, 101):
        with pytest.raises(CorruptError, match=f"'r{wrong}'"):
            written(tmp_path, [content(3, 400_000)], records_of_a_clone(wrong))


def test_a_clone_with_whole_records_is_written(tmp_path: Path) -> None:
    held = content(3, 400_000)
    assert written(tmp_path, [held], records_of_a_clone(-1)) == held[:3] + b"new" + held[6:]


@pytest.mark.parametrize("lost", [50, 128 * 7 + 60])
def test_a_small_copy_that_does_not_arrive_is_noticed(
    lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those with a checksum, and of those without."""
    plan, write = small_copies(lambda _, data: zlib.crc32(data)), os.pwrite

    def losing(fd: int, data: bytes, at: int) -> int:
        changed = bytearray(data)
        if at <= lost < at + len(changed):
            changed[lost - at] ^= 1
        return write(fd, changed, at)

    monkeypatch.setattr(os, "pwrite", losing)
    with pytest.raises(WriteError):
        written(tmp_path, [content(3, 100_000)], plan)
    assert not (tmp_path / "out").exists()


def lost_gap(plan: Plan) -> int:
    """An offset between two records, that no checksum spans."""
    sums = plan.checksums
    return next(
        a.at + a.nbytes
        for a, b in zip(sums[len(sums) // 2 :], sums[len(sums) // 2 + 1 :], strict=False)
        if a.at + a.nbytes < b.at
    )


CLONE = records_of_a_clone(-1)


@pytest.mark.parametrize(
    ("plan", "lost"),
    [(Plan("copy", 400_000, (Copy(0, 400_000, 0),), ()), 399_999), (CLONE, lost_gap(CLONE))],
    ids=["without checksums", "between records"],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the call is Linux's")
def test_a_byte_that_the_kernel_does_not_copy_is_noticed(
    plan: Plan, lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sys.platform == "linux"  # for mypy
    copy = os.copy_file_range

    def losing(source: int, fd: int, nbytes: int, start: int, at: int) -> int:
        moved = copy(source, fd, nbytes, start, at)
        if at <= lost < at + moved:
            os.pwrite(fd, bytes([os.pread(source, 1, start + lost - at)[0] ^ 1]), lost)
        return moved

    monkeypatch.setattr(os, "copy_file_range", losing)
    with pytest.raises(WriteError, match="did not arrive"):
        written(tmp_path, [content(3, 400_000)], plan)
    assert not (tmp_path / "out").exists()


BOTH = (content(1, 300_000), content(2, 200_000))
JOINED = Plan("relay", 500_000, (Copy(0, 300_000, 0), Copy(0, 200_000, 300_000, 1)), ())
TRANSPOSED = Gather(10, 200_000, 1, 0, 200_000, "int16", (1000, 100), (1, 1000), 0)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("how", [os.utime, lambda path: os.truncate(path, 100_000)])
def test_any_source_that_changes_is_refused(
    which: int, how: Callable[[Path], object], tmp_path: Path
) -> None:
    changed = tmp_path / f"in-{which}"
    with pytest.raises(CorruptError) as caught:
        written(tmp_path, BOTH, JOINED, meanwhile=lambda: how(changed))
    assert caught.value.path == os.fspath(changed)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("which", [0, 1])
def test_damage_is_that_of_the_source_that_has_it(which: int, tmp_path: Path) -> None:
    checksums = tuple(
        Checksum(copy.at, copy.nbytes, zlib.crc32(BOTH[copy.source]), f"of {n}", 0, n)
        for n, copy in enumerate(JOINED.copies)
    )
    plan = JOINED._replace(checksums=checksums)
    assert written(tmp_path, BOTH, plan) == b"".join(BOTH)
    (tmp_path / "out").unlink()
    damaged = [bytearray(data) for data in BOTH]
    damaged[which][150_000] ^= 1
    with pytest.raises(CorruptError, match=f"'of {which}' is damaged") as caught:
        written(tmp_path, [bytes(data) for data in damaged], plan)
    assert caught.value.path == os.fspath(tmp_path / f"in-{which}")
    assert not (tmp_path / "out").exists()


def test_the_destination_is_none_of_the_sources(tmp_path: Path) -> None:
    with open_sources(tmp_path, BOTH) as sources:
        for n in (0, 1):
            with pytest.raises(RefusedError, match="source itself"):
                check_file(tmp_path / f"in-{n}", sources, force=True)
        check_file(tmp_path / "out", sources, force=False)


def test_room_is_needed_for_all_that_is_gathered(tmp_path: Path) -> None:
    spread = Gather(0, 3 << 20, 0, 0, 1, "uint8", (3 << 20,), (0,), 0)
    plan = Plan("relay", 3 << 20, (), (), gathers=(spread,))
    with open_sources(tmp_path, [b"a"]) as sources:
        check_room(tmp_path / "out", [plan], sources)
        with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=4m", "none") as small:
            check_room(small / "out", [plan], sources)
            with pytest.raises(RefusedError, match="6,291,456 bytes are needed"):
                check_room(small / "out", [plan, plan], sources)


def test_what_is_private_in_one_source_stays_private(tmp_path: Path) -> None:
    for n, mode in enumerate((0o644, 0o600)):
        (tmp_path / f"in-{n}").touch()
        (tmp_path / f"in-{n}").chmod(mode)
    written(tmp_path, BOTH, JOINED)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o600


def test_a_part_of_a_source_is_no_clone_of_it(tmp_path: Path) -> None:
    part = Plan("clone", 100, (Copy(0, 100, 0, 1),), ())
    assert part.is_clone
    assert written(tmp_path, BOTH, part) == BOTH[1][:100]


@pytest.mark.parametrize("sizes", [[], [199_999], [200_001], [100_000, 100_001], [200_000, 1]])
def test_a_gather_that_gives_too_little_or_too_much_is_noticed(
    sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "gather_chunks", lambda *_: map(bytearray, sizes))
    plan = Plan("relay", 200_020, (), (Write(0, b"0123456789"),), gathers=(TRANSPOSED,))
    with pytest.raises(WriteError, match="is not 200,000 bytes"):
        written(tmp_path, BOTH, plan)
    assert not (tmp_path / "out").exists()


def test_what_is_sealed_knows_the_sums_of_everything_before_it(tmp_path: Path) -> None:
    """Copies, gathers, writes and gaps of one measure; and an empty one."""

    def seal(crcs: Sequence[int]) -> list[Write]:
        assert crcs[1] == 0
        return [Write(0, struct.pack("<I", crcs[0]))]

    copies = (Copy(0, 300_000, 200_010),)
    measures = (CrcRange(4, 600_000), CrcRange(600_010, 0))
    writes = (Write(4, b"head"), Write(400_000, b"over it"))
    plan = Plan("relay", 600_020, copies, writes, (), (TRANSPOSED,), measures, seal)
    made = written(tmp_path, BOTH, plan)
    assert made[:4] == struct.pack("<I", zlib.crc32(made[4:600_004]))
    assert made[10:200_010] == b"".join(
        BOTH[1][n : n + 2] for start in range(0, 2000, 2) for n in range(start, 200_000, 2000)
    )
    assert made[400_000:400_007] == b"over it"


def test_an_error_while_sealing_leaves_nothing(tmp_path: Path) -> None:
    def seal(_crcs: Sequence[int]) -> list[Write]:
        raise WriteError("no")

    with pytest.raises(WriteError, match="no"):
        written(tmp_path, BOTH, JOINED._replace(seal=seal))
    assert not (tmp_path / "out").exists()
