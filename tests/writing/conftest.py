"""The checkpoints that several files write, and what must not be left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.making.staging import leaving_nothing, small_source, sparse_source, training_source


@pytest.fixture
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """After each test: as many open files as before, and no temporary file."""
    with leaving_nothing(tmp_path):
        yield


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small checkpoint."""
    return small_source(tmp_path)


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    """A checkpoint that is copied in several steps."""
    return sparse_source(tmp_path)


@pytest.fixture
def run_pt(tmp_path: Path) -> Path:
    """A training checkpoint from cuda:1."""
    return training_source(tmp_path)
