"""Stores other than S3: what fsspec's transactions promise, and what becomes of those without."""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ckptmove.errors import CorruptError, RefusedError, WriteError
from ckptmove.plans.plan import Copy, CrcRange, Plan, Write
from ckptmove.writing import destination_of
from tests.making.plans import content, open_sources

fsspec = pytest.importorskip("fsspec")
from fsspec.registry import _registry  # noqa: E402
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem  # noqa: E402

DATA = content(1, 300_000)
PLAN = Plan("clone", 300_000, (Copy(0, 300_000, 0),), ())


class Kept(AbstractFileSystem):
    """Keeps what was committed; each protocol as stores of its kind do."""

    protocol: ClassVar[Any] = "kept"
    there: ClassVar[dict[str, bytes]] = {}
    pending: ClassVar[dict[str, bytes]] = {}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        options.pop("cache_options", None)
        kind = {"plain": PlainFile, "az": ClosedFile}.get(self.protocol, CommittedFile)
        return kind(self, path, mode, **options)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path not in self.there:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.there[path]), "type": "file"}


class Plain(Kept):
    """Has no transactions."""

    protocol = "plain"


class Azure(Kept):
    """Commits what is closed."""

    protocol = "az"


class PlainFile(AbstractBufferedFile):
    """Written chunk by chunk, seen when it is closed."""

    def _initiate_upload(self) -> None:
        self.fs.pending[self.path] = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.fs.pending[self.path] += self.buffer.getvalue()
        if final:
            self.finish()
        return True

    def finish(self) -> None:
        self.fs.there[self.path] = self.fs.pending.pop(self.path)


class ClosedFile(PlainFile):
    """What Azure's are like."""


class CommittedFile(PlainFile):
    """What Google's are like."""

    def finish(self) -> None:
        if self.autocommit:
            super().finish()

    def commit(self) -> None:
        super().finish()

    def discard(self) -> None:
        self.fs.pending.pop(self.path, None)


@pytest.fixture(params=["kept", "az"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where to write."""
    for kind in (Kept, Plain, Azure):
        fsspec.register_implementation(kind.protocol, kind, clobber=True)
    yield f"{request.param}://box/x"
    for kind in (Kept, Plain, Azure):
        _registry.pop(kind.protocol)
    Kept.there.clear()
    Kept.pending.clear()


def test_nothing_is_seen_before_it_is_committed(url: str, tmp_path: Path) -> None:
    with open_sources(tmp_path, [DATA]) as sources:
        with destination_of(url).new_file(sources, force=False) as file:
            assert file.write(PLAN) == "upload"
            assert Kept.there == {}
            file.commit()
        assert Kept.there == {"box/x": DATA}
        with pytest.raises(RefusedError, match="exists"):
            destination_of(url).new_file(sources, force=False)
        with destination_of(url).new_file(sources, force=True) as file:
            file.write(PLAN._replace(nbytes=300_001))
            file.commit()
    assert Kept.there == {"box/x": DATA + b"\0"}


@pytest.mark.sample(2)
@pytest.mark.parametrize("when", ["written", "torn", "never"])
def test_what_is_not_committed_is_gone(url: str, when: str, tmp_path: Path) -> None:
    with open_sources(tmp_path, [DATA]) as sources:
        with destination_of(url).new_file(sources, force=False) as file:
            if when == "written":
                file.write(PLAN)
            elif when == "torn":
                (tmp_path / "in-0").write_bytes(DATA[:1000])
                with pytest.raises(CorruptError):
                    file.write(PLAN)
        del file
    gc.collect()  # files of fsspec's close themselves when nobody has them any more
    assert Kept.there == {}


def test_what_appears_meanwhile_stays(url: str, tmp_path: Path) -> None:
    with (
        open_sources(tmp_path, [DATA]) as sources,
        destination_of(url).new_file(sources, force=False) as file,
    ):
        file.write(PLAN)
        Kept.there["box/x"] = b"theirs"
        with pytest.raises(RefusedError, match="exists"):
            file.commit()
    assert Kept.there == {"box/x": b"theirs"}


def test_what_has_another_size_then_is_told_of(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(self: Any) -> None:
        self.fs.there[self.path] = self.fs.pending.pop(self.path)[:-1]

    monkeypatch.setattr(PlainFile, "finish", finish)
    with (
        open_sources(tmp_path, [DATA]) as sources,
        destination_of(url).new_file(sources, force=False) as file,
    ):
        file.write(PLAN)
        with pytest.raises(WriteError, match="it has 299999 bytes, not 300,000: remove it"):
            file.commit()


@pytest.mark.sample(1)
def test_what_is_sealed_too_early_is_sent_twice(url: str, tmp_path: Path) -> None:
    def seal(crcs: Sequence[int]) -> list[Write]:
        return [Write(0, struct.pack("<I", crcs[0]))]

    nbytes, told = (40 << 20) + 4, list[int]()
    plan = Plan(
        "relay", nbytes, (Copy(0, 300_000, 4),), (), (), (), (CrcRange(4, nbytes - 4),), seal
    )
    with (
        open_sources(tmp_path, [DATA]) as sources,
        destination_of(url).new_file(sources, force=False) as file,
    ):
        file.write(plan, told.append)
        with file.open_written() as again:
            head = again.read(0, 10)
        file.commit()
    with (
        open_sources(tmp_path, [DATA]) as sources,
        destination_of(tmp_path / "x").new_file(sources, force=False) as here,
    ):
        here.write(plan)
        here.commit()
    assert Kept.there["box/x"] == (tmp_path / "x").read_bytes()
    assert Kept.there["box/x"][:10] == head
    assert sum(told) == nbytes


@pytest.mark.sample(1)
def test_what_has_no_transactions_is_refused(url: str, tmp_path: Path) -> None:
    with (
        open_sources(tmp_path, [DATA]) as sources,
        destination_of("plain://box/x").new_file(sources, force=False) as file,
    ):
        with pytest.raises(RefusedError, match="what is not complete would be seen"):
            file.write(PLAN)
        del file
    gc.collect()
    assert Kept.there == {}
