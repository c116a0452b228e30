"""is_respelling(): what it proves, a walk of both pickles finds as well; what is wrong, neither."""

from __future__ import annotations

import pickletools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.errors import CkptmoveError, CorruptError
from ckptmove.pickles.compare import difference
from ckptmove.pickles.replacements import Replacement, apply_replacements
from ckptmove.pickles.respelled import is_respelling
from ckptmove.pickles.scan import Survey
from ckptmove.pickles.splice import Respelling, changes
from ckptmove.pickles.walk import walk
from tests.making.building import Stored, dumps
from tests.making.saving import as_a_tagger_returns
from tests.pickles.test_splice import ODD, TAGS, limited, moves_of, saved_trees, uses_of


def planned(
    data: bytes, moves: Mapping[int, str], *, exact: bool
) -> tuple[list[Replacement] | None, dict[int, str]]:
    """The changes that move some persistent ids, by their number; and the texts that this makes."""
    uses, new = uses_of(data), Respelling()
    for number, text in moves.items():
        new.text(uses[number], text)
    found = changes(Survey(data), new, exact=exact)
    return None if found is None else list(found), new.texts


def proves(data: bytes, found: list[Replacement], texts: dict[int, str]) -> bool:
    result = is_respelling(Survey(data), found, texts)
    assert is_respelling(Survey(data, walk(data).recalled), found, texts) is result
    return result


def walks_alike(data: bytes, found: list[Replacement], texts: dict[int, str]) -> bool:
    """Whether the graph of what the changes make is the old one, but for the texts."""
    try:
        return difference(walk(data), walk(apply_replacements(data, found)), texts, {}) is None
    except CkptmoveError:
        return False


@given(saved_trees(), moves_of, st.booleans(), st.booleans(), st.booleans())
def test_what_is_planned_for_a_file_of_torch_is_proved(
    saved: object, moves: dict[int, str], python: bool, squeezed: bool, exact: bool
) -> None:
    data = dumps(saved, 2, python=python)
    data = pickletools.optimize(data) if squeezed else data
    found, texts = planned(data, limited(data, moves), exact=exact)
    if found:
        assert walks_alike(data, found, texts)
        assert proves(data, found, texts)


@given(saved_trees(), moves_of, st.sampled_from(TAGS), st.data())
def test_other_texts_than_were_asked_for_are_no_proof(
    saved: object, moves: dict[int, str], other: str, data_of: st.DataObject
) -> None:
    data = dumps(saved, 2)
    found, texts = planned(data, limited(data, moves), exact=False)
    if not found:
        return
    at = data_of.draw(st.sampled_from(sorted(texts)))
    fewer = {use: text for use, text in texts.items() if use != at}
    for asked in (fewer, {**texts, at: other}, {**texts, at + 1: other}):
        if proves(data, found, asked):
            assert walks_alike(data, found, asked)


OPCODES = st.sampled_from(
    [
        *(b"X" + len(tag).to_bytes(4, "little") + tag.encode() for tag in [*TAGS, "storage"]),
        *(bytes([code, n]) for code in b"hqK" for n in range(12)),
        *(bytes([code]) + n.to_bytes(4, "little") for code in b"jrJ" for n in (0, 3, 5, 70_000)),
        *(b"", b"\x8c\x03cpu", b"\x94", b"0", b"2", b")", b".", b"N", b"K", b"X\x09"),
    ]
)


@given(saved_trees(), moves_of, st.booleans(), st.data())
def test_what_is_not_the_same_in_the_graph_is_not_proved(
    saved: object, moves: dict[int, str], exact: bool, draws: st.DataObject
) -> None:
    """Replacements are varied, left out and added, at opcodes or anywhere."""
    data = dumps(saved, 2)
    found, texts = planned(data, limited(data, moves), exact=exact)
    places = [position for _, _, position in pickletools.genops(data) if position is not None]
    mutated = list(found or [])
    for _ in range(draws.draw(st.integers(1, 3))):
        kind = draws.draw(st.integers(0, 4))
        if kind < 3 and mutated:
            n = draws.draw(st.integers(0, len(mutated) - 1))
            start, end, new = mutated[n]
            put = draws.draw(OPCODES)
            mutated[n : n + 1] = [
                [(start, end, put)],
                [(start, end, new + put)],
                [],
            ][kind]
        else:
            nth = draws.draw(st.integers(0, len(places) - 2))
            start, end = places[nth], places[nth + 1]
            if kind == 4:
                start, end = start + 1, end + 1
            mutated = [each for each in mutated if each[1] <= start or each[0] >= end]
            mutated = sorted([*mutated, (start, end, draws.draw(OPCODES))])
    if proves(data, mutated, texts):
        assert walks_alike(data, mutated, texts)


LITERAL = b"X\x03\0\0\0cpu"


def changed(data: bytes, *replaced: tuple[bytes, bytes], texts: Mapping[bytes, str]) -> bool:
    """Whether it is proved that these bytes, which occur once, become others."""
    found = list[Replacement]()
    for old, new in replaced:
        assert data.count(old) == 1
        at = data.index(old)
        found.append((at, at + len(old), new))
    found.sort()
    asked = {data.index(use): text for use, text in texts.items()}
    result = is_respelling(Survey(data), found, asked)
    if result:
        assert walks_alike(data, found, asked)
    return result


def test_a_use_that_recalls_the_old_text_is_found() -> None:
    data = b"\x80\x02(" + LITERAL + b"q\x01K\x07h\x01t."
    new = b"X\x03\0\0\0mps"
    assert changed(data, (LITERAL, new), texts={LITERAL: "mps", b"h\x01": "mps"})
    assert not changed(data, (LITERAL, new), texts={LITERAL: "mps"})
    kept = [(LITERAL, new), (b"q\x01", b""), (b"h\x01", LITERAL)]
    assert changed(data, *kept, texts={LITERAL: "mps"})
    assert not changed(data, *kept, texts={LITERAL: "mps", b"h\x01": "mps"})
    assert not changed(data, *kept[::2], texts={LITERAL: "mps", b"h\x01": "mps"})


def test_a_slot_that_is_recalled_may_not_be_lost_or_taken() -> None:
    data = b"\x80\x02(" + LITERAL + b"q\x01K\x07q\x02h\x01h\x02t."
    assert not changed(data, (b"q\x02", b""), texts={})
    assert not changed(data, (b"q\x02", b"q\x01"), texts={})
    assert not changed(data, (b"h\x02", b"h\x01"), texts={})
    assert changed(data, (b"h\x02", b"j\x02\0\0\0"), (b"q\x02", b"r\x02\0\0\0"), texts={})
    assert changed(data, (b"K\x07", b"J\x07\0\0\0"), texts={})
    assert not changed(data, (b"K\x07", b"J\x07\0\0\x80"), texts={})
    assert not changed(data, (b"K\x07", LITERAL), texts={})


def test_short_strings_count_as_long_ones() -> None:
    data = b"\x80\x04(\x8c\x03cpuq\x01K\x07h\x01t."
    use = b"\x8c\x03cpu"
    for new in (b"X\x03\0\0\0mps", b"\x8c\x03mps", b"\x8d\x03\0\0\0\0\0\0\0mps"):
        assert changed(data, (use, new), texts={use: "mps", b"h\x01": "mps"})


@pytest.mark.parametrize("way", ODD)
def test_odd_memos_are_left_to_the_walk(way: str) -> None:
    before, memoized, recalled = ODD[way]
    head = b"(X\x07\0\0\0storage" + before + b"ctorch\nFloatStorage\nX\x01\0\0\x000"
    data = b"\x80\x02(" + head + LITERAL + memoized + b"K\x04tQ" + recalled + b"t."
    use = data.index(LITERAL)
    edit = use, use + len(LITERAL), b"X\x03\0\0\0mps"
    if is_respelling(Survey(data), [edit], {use: "mps"}):
        assert walks_alike(data, [edit], {use: "mps"})


@pytest.mark.parametrize("way", [b"N0q\x05", b"(NN1q\x05", b"q\x01N0r\x05\0\0\0", b"2q\x050"])
def test_a_string_that_is_on_top_again_proves_nothing(way: bytes) -> None:
    """A PUT that follows later memoizes it as well: who recalls that would get the new text."""
    data = b"\x80\x02(" + LITERAL + way + b"K\x04h\x05t."
    assert not changed(data, (LITERAL, b"X\x03\0\0\0mps"), texts={LITERAL: "mps"})
    plain = data.replace(way, b"q\x05")
    assert changed(plain, (LITERAL, b"X\x03\0\0\0mps"), texts={LITERAL: "mps", b"h\x05": "mps"})


@pytest.mark.parametrize("protocol", [2, 4])
def test_frames_and_counted_slots_prove_nothing(protocol: int) -> None:
    data = dumps([Stored("0", "cpu"), "x"], protocol)
    found, texts = planned(data, {0: "mps"}, exact=False)
    assert found is not None
    assert proves(data, found, texts) == (protocol == 2)


@pytest.mark.parametrize("tag", ["cpu", "cuda:1"])
@pytest.mark.parametrize("exact", [True, False])
def test_many_storages_are_proved(tag: str, exact: bool) -> None:
    """As torch spells them: `cpu` is one string, others are made for each storage."""
    tags = [tag if tag == "cpu" else as_a_tagger_returns(tag) for _ in range(600)]
    data = dumps([[Stored(str(n), each) for n, each in enumerate(tags)], tag, "end"])
    for moves in (dict.fromkeys(range(600), "cuda:0"), dict.fromkeys(range(0, 600, 7), "mps")):
        found, texts = planned(data, moves, exact=exact)
        assert found is not None
        assert proves(data, found, texts)
        assert not proves(data, found[:-1], texts) or walks_alike(data, found[:-1], texts)


def test_edits_that_overlap_or_end_behind_the_pickle_prove_nothing() -> None:
    data = b"\x80\x02(" + LITERAL + b"q\x01K\x07t."
    at = data.index(LITERAL)
    literal = at, at + len(LITERAL), b"X\x03\0\0\0mps"
    assert not proves(data, [literal, (at + 2, at + 8, b"")], {at: "mps"})
    assert not proves(data + b"K\x01", [literal, (len(data), len(data) + 2, b"")], {at: "mps"})
    with pytest.raises(CorruptError):
        walk(data[:-1])
    assert proves(data, [literal], {at: "mps"})


def test_a_use_that_no_edit_changes_is_missed() -> None:
    data = b"\x80\x02(" + LITERAL + b"q\x01K\x07t."
    widened = (b"K\x07", b"J\x07\0\0\0")
    assert changed(data, widened, texts={})
    assert not changed(data, widened, texts={LITERAL: "mps"})
