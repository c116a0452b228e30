"""Folders to read from and write to, one for each implementation of a place.

Tests with the fixture `root` run with all of them: a local folder, fsspec's `memory://`, and S3.
They check results with pathlib and fsspec.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.object_store import Store

KINDS = ("local", "memory", "s3")


class Root:
    """An empty folder or prefix."""

    def __init__(self, path: str) -> None:
        self.path = path

    def at(self, name: str) -> str:
        """The path or URL of a name in it."""
        return f"{self.path}/{name}"

    def put(self, name: str, data: bytes) -> str:
        """Write a file in it; gives its path or URL."""
        path = Path(self.at(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return self.at(name)

    def files(self) -> dict[str, bytes]:
        """All files below it, by their names."""
        here = Path(self.path)
        return {
            path.relative_to(here).as_posix(): path.read_bytes()
            for path in here.rglob("*")
            if path.is_file()
        }


class RemoteRoot(Root):
    def __init__(self, path: str) -> None:
        import fsspec

        super().__init__(path)
        self._fs, self._path = fsspec.core.url_to_fs(path, use_listings_cache=False)

    def put(self, name: str, data: bytes) -> str:
        self._fs.pipe_file(f"{self._path}/{name}", data)
        return self.at(name)

    def files(self) -> dict[str, bytes]:
        self._fs.invalidate_cache()
        return {
            path[len(self._path) + 1 :]: self._fs.cat_file(path)
            for path in self._fs.find(self._path)
        }


@pytest.fixture(params=KINDS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Root]:
    """Each implementation in turn; plans write next to a local root, not into it."""
    if request.param == "local":
        (tmp_path / "root").mkdir()
        yield Root(str(tmp_path / "root"))
    elif request.param == "memory":
        pytest.importorskip("fsspec", reason="fsspec is not installed")
        yield RemoteRoot(f"memory://{uuid.uuid4().hex}/root")
    else:
        store: Store = request.getfixturevalue("store")
        yield RemoteRoot(store.url("root"))
