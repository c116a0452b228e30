"""What holds of every place, here or in a store: names, folders and files, and what is read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ckptmove.errors import CorruptError, InputError, UnsupportedError
from ckptmove.sources import place_of
from ckptmove.sources.place import EntryKind
from tests.servers.roots import Root

CONTENT = random.Random(7).randbytes((9 << 20) + 5)


def test_names_and_what_they_are_names_of(root: Root) -> None:
    place = place_of(root.path)
    child = place.child("a b.pt")
    assert (child.path, child.name) == (root.at("a b.pt"), "a b.pt")
    assert (child.parent.path, place.child("x/y").name) == (root.path, "y")
    assert place_of(f"{root.path}/").name == place.name == "root"
    assert place_of(child.absolute()).absolute() == child.absolute()
    identity = place.folder_identity()
    assert place_of(f"{root.path}/").folder_identity() == identity
    assert place.child("sub").folder_identity().startswith(identity)


def test_any_range_is_what_it_is(root: Root) -> None:
    root.put("content", CONTENT)
    chance = random.Random(3)
    with place_of(root.at("content")).open() as source:
        assert source.nbytes == len(CONTENT)
        for _ in range(100):
            nbytes = chance.choice((0, 1, 100, 40_000, 3 << 20))
            start = chance.randrange(len(CONTENT) - nbytes)
            assert source.read(start, nbytes) == CONTENT[start : start + nbytes]
        assert b"".join(part for _, part in source.chunks(5, 8 << 20)) == CONTENT[5 : 5 + (8 << 20)]
        buffer = bytearray(5 << 20)
        source.read_into(77, buffer)
        assert buffer == CONTENT[77 : 77 + len(buffer)]
        for start, nbytes in ((-1, 2), (0, -1), (len(CONTENT), 1), (5, len(CONTENT))):
            with pytest.raises(CorruptError, match="outside the file"):
                source.read(start, nbytes)
        source.check_unchanged()


def test_a_file_that_is_replaced_while_it_is_open_is_an_error(root: Root) -> None:
    with place_of(root.put("content", b"before")).open() as source:
        root.put("content", b"after it")
        with pytest.raises(CorruptError, match="changed while it was read"):
            source.check_unchanged()


def test_files_folders_and_what_is_not_there(root: Root) -> None:
    root.put("a/b/run.pt", b"xyz")
    for name, folder in {"a": True, "a/": True, "a/b": True, "a/b/run.pt": False}.items():
        place = place_of(root.at(name))
        assert (place.exists(), place.is_folder()) == (True, folder), name
    assert place_of(root.at("a/b/run.pt")).nbytes() == 3
    missing = place_of(root.at("missing"))
    assert (missing.exists(), missing.is_folder(), missing.nbytes()) == (False, False, 0)
    for ask in (missing.open, missing.size_and_stamp, missing.entries, missing.files_below):
        with pytest.raises(InputError, match="can't be read"):
            ask()
    with pytest.raises(UnsupportedError, match="a single file is needed"):
        place_of(root.at("a")).open()


def test_a_stamp_changes_with_the_file(root: Root) -> None:
    place = place_of(root.put("x", b"one"))
    nbytes, stamp = place.size_and_stamp()
    assert (nbytes, place.size_and_stamp()[1]) == (3, stamp)
    listed = {each.name: (each.nbytes, each.stamp) for each in place.parent.files_below()}
    assert listed == {"x": (3, stamp)}, "told the same by a listing"
    root.put("x", b"three")
    assert place.size_and_stamp()[1] != stamp


def test_what_is_in_a_folder(root: Root) -> None:
    for name in ("b", "a/one", "a/deep/two", "c d"):
        root.put(name, name.encode())
    place = place_of(root.path)
    entries = place.entries()
    assert [each.name for each in entries] == ["a", "b", "c d"]
    assert [each.path for each in entries] == [root.at(each.name) for each in entries]
    kinds = [EntryKind.FOLDER, EntryKind.FILE, EntryKind.FILE]
    assert [each.kind for each in entries] == kinds
    assert [each.nbytes for each in entries][1:] == [1, 3]
    below = {each.name: (each.path, each.nbytes) for each in place.files_below()}
    assert below == {name: (root.at(name), len(data)) for name, data in root.files().items()}
    kept = place.files_below(lambda name: name in ("deep", "b"))
    assert sorted(each.name for each in kept) == ["a/one", "c d"]


def test_what_is_no_file_is_said_to_be_none(tmp_path: Path) -> None:
    """Only folders here have such."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "broken").symlink_to("nothing")
    place = place_of(tmp_path)
    kinds = {each.name: each.kind for each in place.entries()}
    assert kinds == {
        "folder": EntryKind.FOLDER,
        "link": EntryKind.FOLDER_LINK,
        "broken": EntryKind.BROKEN_LINK,
    }
    assert sorted(each.name for each in place.files_below()) == ["broken", "folder/", "link"]
