"""What holds of every tree of a batch and of its ledger, here or in a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmove.batches.trees import open_ledger, tree_at
from ckptmove.errors import InputError
from ckptmove.reports.batch.items import LedgerEntry
from ckptmove.sources.place import EntryKind
from tests.servers.roots import Root

NAMES = ("run.pt", "a/run.pt", "a/b/one", "a/b/two")


@pytest.fixture
def full(root: Root) -> Root:
    """A root with files, and with what is ours in it."""
    for name in NAMES:
        root.put(name, name.encode())
    root.put(".ckptmove-batch.jsonl", b"")
    root.put("a/.run.pt.0123abcd.ckptmove-tmp", b"half")
    return root


def test_a_tree_is_listed_without_what_is_ours(full: Root) -> None:
    tree = tree_at(full.path)
    listing, todo, found = tree.listings(), [full.path], list[str]()
    while todo:
        for each in listing(todo.pop()):
            if each.kind is EntryKind.FOLDER:
                todo.append(each.path)
            else:
                found.append(each.path)
    assert sorted(found) == sorted(map(full.at, NAMES))
    assert sorted(each.name for each in tree.files()) == sorted(NAMES)
    assert tree.sizes() == {name: len(name) for name in NAMES}
    assert tree_at(full.at("run.pt")).sizes() == {"": 6}
    assert list(tree.map_items(len, NAMES)) == list(map(len, NAMES))
    assert tree.prepare_calls(len, NAMES)("a/run.pt") == 8


def test_what_is_not_there_is_said(root: Root) -> None:
    root.put("x", b"x")
    missing = tree_at(root.at("missing"))
    for ask in (missing.files, missing.sizes, lambda: missing.output(summed=False)):
        with pytest.raises(InputError, match="can't be read"):
            ask()
    assert missing.nbytes_of([missing.path, root.at("x")]) == 1
    with pytest.raises(InputError):
        missing.stamp_of([missing.path])


def test_an_output_is_known_by_its_stamp(full: Root) -> None:
    tree = tree_at(full.at("a"))
    before = tree.output(summed=True)
    assert before == tree.output(summed=True)
    assert before.nbytes == sum(tree.sizes().values())
    assert before.stamp == tree.stamp_of([each.path for each in tree.files()])
    full.put("a/b/one", b"another")
    after = tree.output(summed=True)
    assert after.stamp != before.stamp
    assert (after.crc32 != before.crc32) or after.crc32 == 0


@pytest.mark.sample(1)
def test_what_is_equal_and_what_is_taken(full: Root, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for name in NAMES[1:]:
        path = other / Path(name).relative_to("a")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    tree = tree_at(full.at("a"))
    assert tree.same(tree_at(str(other)))
    (other / "b" / "one").write_bytes(b"a/b/ONE")
    assert not tree.same(tree_at(str(other)))
    (other / "b" / "one").unlink()
    assert not tree.same(tree_at(str(other)))
    (other / "b" / "eno").write_bytes(b"a/b/one")
    assert not tree.same(tree_at(str(other))), "another name"
    assert tree_at(full.at("run.pt")).holds(b"run.pt")
    assert not tree_at(full.at("run.pt")).holds(b"RUN.pt")
    assert not tree_at(full.at("a")).holds(b"")
    assert (tree.is_taken(), tree_at(full.at("none")).is_taken()) == (True, False)


def test_there_is_room_beside_an_output(full: Root) -> None:
    before = full.files()
    tree = tree_at(full.at("a/new"))
    with tree.beside() as path:
        Path(path).write_bytes(b"x")
        assert Path(path).name == "new"
        assert tree_at(path).sizes() == {"": 1}
    assert not Path(path).parent.exists()
    assert full.files() == before


def test_a_ledger_knows_the_last_entry_of_each_item(root: Root) -> None:
    tree_at(root.path).make_folder()
    ledger = tree_at(root.path).open_ledger()
    again = open_ledger(ledger.path)
    one, two = (LedgerEntry(name, "key", "done", 7, "stamp", 9) for name in ("a b/ü", "other"))
    assert again.entry(one.name) is None
    with again.lock([one.name], patient=False) as ours:
        assert ours
        again.add(one)
        again.add(two)
        again.add(one._replace(key="new"), synced=True)
    for each in (again, open_ledger(ledger.path), tree_at(root.path).open_ledger()):
        assert each.entry(one.name) == one._replace(key="new")
        assert each.entry(two.name) == two
        assert each.entry("nobody") is None
    assert tree_at(root.path).files() == []
