"""Folders of models: each is what its library loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.making.model_folders import FOLDERS, copy_of
from tests.oracles.model_folders import loaded
from tests.oracles.sameness import assert_same_tree


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "diffusers" else n for n in FOLDERS]
)
def test_its_library_loads_it(name: str, tmp_path: Path) -> None:
    one, two = (loaded(name, copy_of(name, tmp_path / copy)) for copy in ("one", "two"))
    assert one
    assert_same_tree(one, two)
