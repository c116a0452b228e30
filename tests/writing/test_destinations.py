"""What holds of every destination, here or in a store: all of it appears, or nothing does."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmove.errors import CorruptError, RefusedError, WriteError
from ckptmove.plans.plan import Copy, Plan, Write
from ckptmove.sources import place_of
from ckptmove.writing import destination_of
from tests.making.plans import content, open_sources
from tests.servers.roots import Root

DATA = content(1, 300_000)
PLAN = Plan("clone", 300_000, (Copy(0, 300_000, 0),), ())
TEXT = Plan("relay", 2, (), (Write(0, b"{}"),))


def test_a_file_appears_when_it_is_committed(root: Root, tmp_path: Path) -> None:
    destination = destination_of(root.at("x"))
    steps = list[int]()
    with open_sources(tmp_path, [DATA]) as sources:
        destination.check_file(sources, force=False)
        with destination.new_file(sources, force=False) as file:
            file.write(PLAN, steps.append)
            with file.open_written() as again:
                assert again.read(0, again.nbytes) == DATA
            assert "x" not in root.files()
            file.commit()
    assert root.files() == {"x": DATA}
    assert sum(steps) == len(DATA)


@pytest.mark.sample(5)
@pytest.mark.parametrize("when", ["written", "torn", "never"])
def test_a_file_that_is_not_committed_is_gone(root: Root, when: str, tmp_path: Path) -> None:
    with (
        open_sources(tmp_path, [DATA]) as sources,
        destination_of(root.at("x")).new_file(sources, force=True) as file,
    ):
        if when == "written":
            file.write(PLAN)
        elif when == "torn":
            (tmp_path / "in-0").write_bytes(DATA[:1000])
            with pytest.raises(CorruptError):
                file.write(PLAN)
    assert root.files() == {}


def test_what_is_there_is_replaced_by_force_only(root: Root, tmp_path: Path) -> None:
    root.put("x", b"theirs")
    destination = destination_of(root.at("x"))
    with open_sources(tmp_path, [DATA]) as sources:
        for refused in (destination.check_file, destination.new_file):
            with pytest.raises(RefusedError, match="the destination exists"):
                refused(sources, force=False)
        with destination.new_file(sources, force=True) as file:
            file.write(PLAN)
            assert root.files()["x"] == b"theirs"
            file.commit()
    assert root.files() == {"x": DATA}


def test_what_appears_meanwhile_stays(root: Root, tmp_path: Path) -> None:
    with (
        open_sources(tmp_path, [DATA]) as sources,
        destination_of(root.at("x")).new_file(sources, force=False) as file,
    ):
        file.write(PLAN)
        root.put("x", b"theirs")
        with pytest.raises(RefusedError, match="exists"):
            file.commit()
    assert root.files() == {"x": b"theirs"}


def test_a_source_is_not_written_over(root: Root) -> None:
    with place_of(root.put("x", DATA)).open() as source:
        with pytest.raises(RefusedError, match="the source itself"):
            destination_of(root.at("x")).check_file([source], force=True)
        with pytest.raises(RefusedError, match="the source is inside the destination"):
            destination_of(f"{root.path}/").check_folder([source], force=True)


def test_a_folder_is_no_file_and_a_file_no_folder(root: Root) -> None:
    root.put("folder/x", b"x")
    with pytest.raises(RefusedError, match="the destination is a directory"):
        destination_of(root.at("folder")).check_file([], force=True)
    with pytest.raises(RefusedError, match="not a directory"):
        destination_of(root.at("folder/x")).check_folder([], force=True)
    assert destination_of(root.at("folder")).is_folder()
    assert not destination_of(root.at("folder/x")).is_folder()
    assert not destination_of(root.at("nothing")).is_folder()


def test_a_folder_appears_with_all_that_is_in_it(root: Root, tmp_path: Path) -> None:
    destination = destination_of(f"{root.at('out')}/")
    assert destination.names_below() == []
    with open_sources(tmp_path, [DATA]) as sources:
        with destination.new_folder(sources, force=False) as folder:
            for name, plan in {"first": PLAN, "a/b/second": TEXT}.items():
                with folder.file(name) as file:
                    file.write(plan)
                    with file.open_written() as again:
                        assert again.nbytes == plan.nbytes
            folder.make("empty")
            assert not any(name.startswith("out/") for name in root.files())
            folder.commit()
        assert root.files() == {"out/first": DATA, "out/a/b/second": b"{}"}
        assert destination.names_below() == ["a/b/second", "first"]
        with pytest.raises(RefusedError, match="the destination exists"):
            destination.check_folder(sources, force=False)
        with destination.new_folder([], force=True) as folder:
            with folder.file("other") as file:
                file.write(TEXT)
            folder.commit()
    assert root.files() == {"out/other": b"{}"}, "what was there before is gone"


def test_a_folder_that_is_not_committed_is_gone(root: Root) -> None:
    destination = destination_of(root.at("out"))
    with destination.new_folder([], force=False) as folder, folder.file("a/b/c") as file:
        file.write(TEXT)
    assert root.files() == {}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["", "/a", "../a", "a/../../b", "a//b", "a/", ".", ".."])
def test_files_stay_in_their_folder(root: Root, name: str) -> None:
    with (
        destination_of(root.at("out")).new_folder([], force=False) as folder,
        pytest.raises(RefusedError),
    ):
        folder.file(name)
    assert root.files() == {}


def test_a_file_is_in_a_folder_once(root: Root) -> None:
    with destination_of(root.at("out")).new_folder([], force=False) as folder:
        folder.file("a")
        with pytest.raises((WriteError, RefusedError)):
            folder.file("a")
