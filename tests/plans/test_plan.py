"""Plan.checks(): every copied byte that stays is verified, once, and against the right one."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmove.plans.plan import Check, Checksum, Copy, Plan, Write

SIZE = 60  # of a destination; small, so that ranges meet in every way


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Copies with gaps between, writes anywhere, checksums where there is room for one."""
    cuts = sorted(draw(st.sets(st.integers(0, SIZE), max_size=8)))
    chosen = [span for span in pairwise(cuts) if draw(st.booleans())]
    copies = tuple(Copy(draw(st.integers(0, 99)), end - at, at) for at, end in chosen)
    pairs = st.tuples(st.integers(0, SIZE), st.integers(0, 25))
    writes = [Write(at, bytes(nbytes)) for at, nbytes in draw(st.lists(pairs, max_size=5))]
    written = {at for write in writes for at in range(write.at, write.at + len(write.data))}
    sums: list[Checksum] = []
    for n, copy in enumerate(copies):
        free = [at for at in range(copy.at, copy.at + copy.nbytes) if at not in written]
        if not free or draw(st.booleans()):
            continue
        start = draw(st.sampled_from(free))
        end = start + 1
        while end in free and end - start < 9:
            end += 1
        source_at = start + copy.source_at - copy.at
        sums.append(Checksum(start, end - start, n, f"record {n}", source_at))
    return Plan("relay", SIZE + 20, copies, tuple(writes), tuple(sums))


def ranges_of(checks: list[Check]) -> list[int]:
    """Each byte that is checked, as often as it is."""
    return [at for check in checks for at in range(check.at, check.at + check.nbytes)]


@settings(max_examples=500)
@given(plans())
def test_each_copied_byte_that_stays_is_checked_once(plan: Plan) -> None:
    written = {at for write in plan.writes for at in range(write.at, write.at + len(write.data))}
    copied = [at for copy in plan.copies for at in range(copy.at, copy.at + copy.nbytes)]
    assert ranges_of(list(plan.checks())) == [at for at in copied if at not in written]


@given(plans())
def test_each_check_looks_where_the_bytes_came_from(plan: Plan) -> None:
    came_from = {
        copy.at + n: copy.source_at + n for copy in plan.copies for n in range(copy.nbytes)
    }
    for check in plan.checks():
        for n in range(check.nbytes):
            assert came_from[check.at + n] == check.source_at + n


@given(plans())
def test_each_checksum_is_used_on_just_its_bytes(plan: Plan) -> None:
    used = [check for check in plan.checks() if check.checksum is not None]
    assert [check.checksum for check in used] == list(plan.checksums)
    for check, sum_ in zip(used, plan.checksums, strict=True):
        assert (check.at, check.nbytes) == (sum_.at, sum_.nbytes)
        assert check.source_at == sum_.source_at


def test_a_clone_is_checked_whole_but_for_what_is_patched() -> None:
    checksum = Checksum(20, 30, 7, "data/0", 20)
    plan = Plan(
        "patch", 100, (Copy(0, 100, 0),), (Write(10, b"12345"), Write(90, b"1")), (checksum,)
    )
    assert plan.is_clone
    assert list(plan.checks()) == [
        Check(0, 10, 0, None),
        Check(15, 5, 15, None),
        Check(20, 30, 20, checksum),
        Check(50, 40, 50, None),
        Check(91, 9, 91, None),
    ]


def test_only_the_whole_source_in_its_place_is_a_clone() -> None:
    assert not Plan("relay", 100, (Copy(0, 99, 0),), ()).is_clone
    assert not Plan("relay", 100, (Copy(1, 100, 0),), ()).is_clone
    assert not Plan("relay", 100, (Copy(0, 50, 0), Copy(50, 50, 50)), ()).is_clone
