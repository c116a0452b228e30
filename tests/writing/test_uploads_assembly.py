"""What a plan makes, part by part: the same as when it is written, and checked on the way."""

from __future__ import annotations

import struct
import threading
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmove.errors import CorruptError, UnsupportedError, WriteError
from ckptmove.plans.plan import Checksum, Copy, CrcRange, Gather, Plan, SourceChecksum, Write
from ckptmove.runtime import gather as gathering
from ckptmove.writing.execute import ProgressCounter
from ckptmove.writing.running_checksums import RunningChecksums
from ckptmove.writing.upload.parts import part_nbytes_for, send
from ckptmove.writing.upload.server_copy import parts_of
from ckptmove.writing.upload.stream_plan import PlanSource
from tests.conftest import examples
from tests.making.plans import Case, cases, content, open_sources
from tests.making.trees import until
from tests.oracles.steps import steps
from tests.servers.fronts import HANG

BOTH = (content(1, 300_000), content(2, 200_000))
JOINED = Plan("relay", 500_000, (Copy(0, 300_000, 0), Copy(0, 200_000, 300_000, 1)), ())
TRANSPOSED = Gather(10, 200_000, 1, 0, 200_000, "int16", (1000, 100), (1, 1000), 0)
DENSE = Gather(0, 150_000, 1, 50_000, 150_000, "uint8", (150_000,), (1,), 0)


def spans(whole: PlanSource | Plan, nbytes: int) -> list[tuple[int, int]]:
    """From where to where its parts of this size go."""
    return [(each.start, each.end) for each in parts_of(whole.nbytes, nbytes)]


def taken(assembled: PlanSource, nbytes: int) -> list[bytes]:
    """Its parts."""
    return [part.getvalue() for part in assembled.parts(spans(assembled, nbytes))]


@settings(max_examples=examples(100))
@given(cases(), st.sampled_from([999, 4096, 1 << 17, 1 << 20]), st.data())
def test_each_byte_is_as_the_model_has_it(case: Case, nbytes: int, data: st.DataObject) -> None:
    with TemporaryDirectory() as name, open_sources(Path(name), case.contents) as sources:
        assembled = PlanSource(case.plan, sources, "out")
        parts = taken(assembled, nbytes)
        assert assembled.settled
        assert b"".join(parts) == case.expected
        assert {len(part) for part in parts[:-1]} <= {nbytes}
        start = data.draw(st.integers(0, assembled.nbytes))
        length = data.draw(st.integers(0, assembled.nbytes - start))
        assert assembled.read(start, length) == case.expected[start : start + length]
        buffer = bytearray(length)
        assembled.read_into(start, buffer)
        assert buffer == case.expected[start : start + length]
        assembled.expect([(start, length), (0, 1 << 30)])


@pytest.mark.parametrize("nbytes", [7, 1000, 1 << 20])
def test_what_is_sealed_before_it_is_measured_takes_a_second_time(
    nbytes: int, tmp_path: Path
) -> None:
    def seal(crcs: Sequence[int]) -> list[Write]:
        return [Write(0, struct.pack("<I", crcs[0])), Write(5000, struct.pack("<I", crcs[0]))]

    plan = Plan("relay", 5004, (Copy(0, 4996, 4),), (), (), (), (CrcRange(4, 4996),), seal)
    with open_sources(tmp_path, BOTH) as sources:
        assembled = PlanSource(plan, sources, "out")
        first = b"".join(taken(assembled, nbytes))
        crc32 = struct.pack("<I", zlib.crc32(BOTH[0][:4996]))
        assert assembled.settled is (nbytes > 5004)  # all of it was in one part
        assert first[4:] == BOTH[0][:4996] + crc32
        assert b"".join(taken(assembled, nbytes)) == crc32 + BOTH[0][:4996] + crc32
        assert assembled.settled
        assert assembled.read(0, 4) == crc32
        (tmp_path / "in-0").write_bytes(bytes(300_000))
        with pytest.raises(CorruptError, match="changed while it was read"):
            taken(assembled, nbytes)


@pytest.mark.parametrize("whole", [False, True])
def test_a_range_is_read_in_as_many_steps_however_much_there_is(
    whole: bool, tmp_path: Path
) -> None:
    def taken_by(count: int) -> int:
        copies = tuple(Copy(100 * n, 80, 100 * n) for n in range(count))
        writes = tuple(Write(100 * n + 80, b"0123456789") for n in range(count))
        seals = [Write(100 * n + 90, b"abcdefghij") for n in range(count)]
        plan = Plan("relay", 100 * count, copies, writes, seal=lambda _: seals)
        assembled = PlanSource(plan, sources, "out")
        if whole:
            taken(assembled, 1 << 20)
        between = b"0123456789abcdefghij"
        at = 100 * count - 120
        assert assembled.read(at, 120) == between + BOTH[0][at + 20 : at + 100] + between
        return steps(partial(assembled.read, at, 120))

    with open_sources(tmp_path, BOTH) as sources:
        assert taken_by(2000) < 3 * taken_by(20)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 100)), max_size=8),
    st.lists(st.integers(1, 80), min_size=1, max_size=8),
)
def test_proofs_may_overlap(ranges: list[tuple[int, int]], read: list[int]) -> None:
    with TemporaryDirectory() as name, open_sources(Path(name), BOTH) as sources:
        given_ = [
            SourceChecksum(start, nbytes, zlib.crc32(BOTH[1][start : start + nbytes]), "proved", 1)
            for start, nbytes in ranges
        ]
        proofs, at = RunningChecksums(given_, sources), 0
        for nbytes in read:
            proofs.bytes_read(1, at, memoryview(BOTH[1])[at : at + nbytes])
            proofs.bytes_read(0, at, memoryview(b"of another source"))
            at += nbytes
        for each in proofs._sums:
            assert proofs._sums[each][0] == max(
                each.source_at, min(at, each.source_at + each.nbytes)
            )
        proofs.check()


def test_what_is_read_is_heard_by_those_it_concerns() -> None:
    def taken(count: int) -> int:
        proofs = RunningChecksums(
            [SourceChecksum(10 * n, 10, 0, "proved") for n in range(count)], []
        )
        data = memoryview(bytes(10))
        return sum(steps(partial(proofs.bytes_read, 0, 10 * n, data)) for n in range(count))

    assert taken(400) < 3 * taken(200)


@pytest.mark.parametrize("which", [0, 1])
def test_damage_is_found_before_the_part_is_given_away(which: int, tmp_path: Path) -> None:
    checksums = tuple(
        Checksum(copy.at, copy.nbytes, zlib.crc32(BOTH[copy.source]), f"of {n}", 0, n)
        for n, copy in enumerate(JOINED.copies)
    )
    plan = JOINED._replace(checksums=checksums)
    damaged = [bytearray(data) for data in BOTH]
    damaged[which][150_000] ^= 1
    given = list[BytesIO]()
    with open_sources(tmp_path, [bytes(data) for data in damaged]) as sources:
        with pytest.raises(CorruptError, match=f"'of {which}' is damaged") as caught:
            given += PlanSource(plan, sources, "out").parts(spans(plan, 1 << 20))
        assert caught.value.path == str(tmp_path / f"in-{which}")
    assert not given
    with open_sources(tmp_path, BOTH) as sources:
        assert b"".join(taken(PlanSource(plan, sources, "out"), 1000)) == b"".join(BOTH)


def test_a_record_that_arrives_otherwise_is_not_the_fault_of_its_source(tmp_path: Path) -> None:
    wrong = Checksum(0, 1000, zlib.crc32(BOTH[0][:1000]), "moved", 0)
    plan = Plan("relay", 1000, (Copy(1, 1000, 0),), (), (wrong,))
    with (
        open_sources(tmp_path, BOTH) as sources,
        pytest.raises(WriteError, match="not as it is in its"),
    ):
        taken(PlanSource(plan, sources, "out"), 1000)


@pytest.mark.parametrize(
    ("gather", "start", "nbytes", "again"),
    [
        (DENSE, 50_000, 150_000, 0),
        (DENSE, 60_000, 1_000, 0),
        (DENSE, 0, 200_000, 200_000),  # what lies before the view is not read for it
        (DENSE, 100_000, 100_000, 0),
        (TRANSPOSED, 0, 200_000, 200_000),
    ],
)
@pytest.mark.parametrize("right", [True, False])
def test_proofs_hold_and_cost_nothing_where_it_was_read_anyway(
    gather: Gather,
    start: int,
    nbytes: int,
    again: int,
    right: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crc32 = zlib.crc32(BOTH[1][start : start + nbytes]) ^ (not right)
    plan = Plan("relay", 200_010, (), (), gathers=(gather,))
    plan = plan._replace(source_checksums=(SourceChecksum(start, nbytes, crc32, "proved", 1),))
    with open_sources(tmp_path, BOTH) as sources:
        read = list[int]()
        chunks = type(sources[1]).chunks

        def counted(
            source: object, start: int, nbytes: int
        ) -> Iterator[tuple[int, bytes | memoryview]]:
            read.append(nbytes)
            return chunks(source, start, nbytes)  # type: ignore[arg-type]

        monkeypatch.setattr(type(sources[1]), "chunks", counted)
        assembled = PlanSource(plan, sources, "out")
        if right:
            made = b"".join(taken(assembled, 1000))
            assert made == assembled.read(0, plan.nbytes)
        else:
            with pytest.raises(CorruptError, match="'proved' is damaged"):
                taken(assembled, 1000)
        assert sum(read[1:] if gather is DENSE else read) == again


@pytest.mark.parametrize("sizes", [[], [199_999], [200_001], [200_000, 1]])
def test_a_gather_that_gives_too_little_or_too_much_is_noticed(
    sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "gather_chunks", lambda *_: map(bytearray, sizes))
    plan = Plan("relay", 200_010, (), (), gathers=(TRANSPOSED,))
    with (
        open_sources(tmp_path, BOTH) as sources,
        pytest.raises(WriteError, match="is not 200,000 bytes"),
    ):
        taken(PlanSource(plan, sources, "out"), 1000)


def test_it_is_nowhere(tmp_path: Path) -> None:
    with open_sources(tmp_path, BOTH) as sources:
        assembled = PlanSource(JOINED, sources, "out")
        with pytest.raises(UnsupportedError, match="not there yet"):
            assembled.mappable(0, 1)
        assert not assembled.same_file(tmp_path / "in-0")
        with pytest.raises(CorruptError, match="outside the file"):
            assembled.read(499_999, 2)


class Slow:
    """Takes parts when it may."""

    part_nbytes, at_once = 1000, 3

    def __init__(self) -> None:
        self.may = threading.Event()
        self.stopped = False
        self.begun = 0

    def put(self, number: int, data: BytesIO) -> None:
        self.begun += 1
        self.may.wait(HANG)

    def stop(self) -> None:
        self.stopped = True
        self.may.set()


def test_as_many_parts_are_in_memory_as_are_sent_at_once_and_one_more(tmp_path: Path) -> None:
    slow, alive, made, most = Slow(), weakref.WeakSet[BytesIO](), list[int](), list[int]()

    def counted(parts: Iterator[BytesIO]) -> Iterator[BytesIO]:
        for part in parts:
            alive.add(part)
            made.append(len(made))
            most.append(len(alive))
            yield part
            del part

    told = list[int]()
    with open_sources(tmp_path, BOTH) as sources:
        parts = counted(PlanSource(JOINED, sources, "out").parts(spans(JOINED, 10_000)))
        thread = threading.Thread(target=send, args=(slow, parts, ProgressCounter(told.append)))
        thread.start()
        until(lambda: len(made) == 4 and slow.begun == 3)
        time.sleep(0.3)  # in which it must not do more; nor if it takes longer
        assert (len(made), told) == (4, [])
        slow.may.set()
        thread.join()
    assert max(most) <= 5  # one may be done, and not yet forgotten
    assert sum(told) == 500_000


@pytest.mark.parametrize("when", [1, 300])
def test_what_goes_wrong_stops_what_is_on_its_way(
    when: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow()
    slow.may.set()

    def put(number: int, data: BytesIO) -> None:
        if number == when:
            raise WriteError("no")

    monkeypatch.setattr(slow, "put", put)
    with open_sources(tmp_path, BOTH) as sources:
        parts = PlanSource(JOINED, sources, "out").parts(spans(JOINED, 1000))
        with pytest.raises(WriteError, match="no"):
            send(slow, parts, ProgressCounter(None))  # type: ignore[arg-type]
    assert slow.stopped


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 30, 160 << 30, (160 << 30) + 1, 5 << 40])
def test_there_are_never_too_many_parts(nbytes: int) -> None:
    size = part_nbytes_for(nbytes)
    assert size >= 16 << 20
    assert -(-nbytes // size) <= 10_000
