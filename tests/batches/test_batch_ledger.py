"""The ledger of a batch: torn lines, strangers' lines, and who holds what."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from ckptmove import RefusedError
from ckptmove.batches.trees.ledger import FileLedger
from ckptmove.reports.batch.items import LedgerEntry
from tests.servers.fronts import HANG

ONE = LedgerEntry("a/run.pt", "f00d", "done", 12, "12-1-2", 99)


def test_what_is_added_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = FileLedger(str(path))
    assert ledger.entry("a/run.pt") is None
    FileLedger(str(path)).add(ONE)
    assert ledger.entry("a/run.pt") == ONE
    other = ONE._replace(key="beef")
    ledger.add(other, synced=True)
    assert ledger.entry("a/run.pt") == other  # the last counts
    assert FileLedger(str(path), ledger.nbytes).entry("a/run.pt") is None


@pytest.mark.parametrize("name", ["süß\n.pt", "\udcff.pt", '"\\', "\udcff" * 4096])
def test_any_name_will_do(name: str, tmp_path: Path) -> None:
    ledger = FileLedger(str(tmp_path / "ledger"))
    ledger.add(ONE._replace(name=name))
    assert ledger.entry(name) == ONE._replace(name=name)
    with ledger.lock([name], patient=False) as held:
        assert held


def test_a_torn_line_counts_as_none_and_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    FileLedger(str(path)).add(ONE)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        ledger = FileLedger(str(path))
        assert ledger.entry(ONE.name) is None
        ledger.add(ONE._replace(name="other"))
        for reader in (ledger, FileLedger(str(path))):
            found = reader.entry(ONE.name)
            assert found in (None, ONE) if cut == len(whole) - 1 else found is None
            assert reader.entry("other") == ONE._replace(name="other")


def test_lines_of_others_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    said = {**ONE._asdict(), "of a later version": [1]}
    lines = [
        *("", "nonsense", "[1]", "{}", '{"name": 1}', "[" * 100_000, '"\\ud800"'),
        *(json.dumps({**said, "nbytes": "12"}), "\0" * 100),
    ]
    path.write_text("\n".join([*lines, json.dumps(said), ""]))
    assert FileLedger(str(path)).entry(ONE.name) == ONE


def test_a_line_that_is_too_long_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    line = json.dumps(ONE._asdict())
    other = json.dumps({**ONE._asdict(), "key": "beef"})
    long = json.dumps({**ONE._asdict(), "key": "x" * 200_000})
    for size in (1 << 16, 1 << 17, 1 << 20):
        padded = other.ljust(size - 1) + other  # what looks like a line where one is cut
        path.write_text("\n".join([line, padded, long, "\0" * size, ""]))
        assert FileLedger(str(path)).entry(ONE.name) == ONE
        with path.open("a") as file:
            file.write("\n" + other + "\n")
        assert FileLedger(str(path)).entry(ONE.name) == ONE._replace(key="beef")


def test_a_ledger_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(RefusedError, match="1,099,511,627,776 bytes") as refused:
        FileLedger(str(path)).entry(ONE.name)
    assert refused.value.hint is not None


def test_another_file_in_its_place_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = FileLedger(str(path))
    ledger.add(ONE)
    assert ledger.entry(ONE.name) == ONE
    path.rename(tmp_path / "old")
    assert ledger.entry(ONE.name) == ONE  # it may be on its way
    FileLedger(str(path)).add(ONE._replace(name="other"))
    assert ledger.entry(ONE.name) is None
    assert ledger.entry("other") is not None
    path.write_text("")
    assert ledger.entry("other") is None


def test_one_at_a_time_holds_an_item(tmp_path: Path) -> None:
    one, other = (FileLedger(str(tmp_path / "ledger")) for _ in range(2))
    with one.lock(["a"], patient=False) as mine:
        assert mine
        with other.lock(["a"], patient=False) as theirs:
            assert not theirs
        with other.lock(["b"], patient=False) as theirs:
            assert theirs
        one.add(ONE)  # opens and closes the file, which must not give up the lock
        with other.lock(["a"], patient=False) as theirs:
            assert not theirs
        got = threading.Event()

        def wait() -> None:
            with other.lock(["a"], patient=True) as theirs:
                assert theirs
                got.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not got.wait(0.2)
    assert got.wait(HANG)
    waiting.join()


def test_many_may_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger"

    def write(who: int) -> None:
        for n in range(50):
            FileLedger(str(path)).add(ONE._replace(name=f"{who}-{n}", stamp="x" * 5000))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger = FileLedger(str(path))
    assert all(ledger.entry(f"{who}-{n}") for who in range(4) for n in range(50))
    assert path.read_bytes().count(b"\n") == 200
    assert path.stat().st_size == ledger.nbytes
