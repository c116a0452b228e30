"""Why torch can't be imported is told the same however often it is asked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckptmove.runtime import torch_import


@pytest.mark.parametrize("first", ["ImportError", "RuntimeError"])
def test_torch_that_fails_half_way_is_imported_once(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second import says only that the first has been there: "already has a docstring"."""
    (tmp_path / "torch.py").write_text(
        "import sys\n"
        "again = sys.modules.get('half_of_torch')\n"
        "sys.modules['half_of_torch'] = sys\n"
        "if again: raise RuntimeError('already has a docstring')\n"
        f"raise {first}('no libcudart')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch_import, "_failure", None, raising=False)
    monkeypatch.delitem(sys.modules, "half_of_torch", raising=False)
    monkeypatch.delitem(sys.modules, "torch")
    try:
        answers = [torch_import.why_no_torch() for _ in range(2)]
    finally:
        sys.modules.pop("half_of_torch", None)
    assert answers == [f"torch can't be imported: {first}: no libcudart"] * 2
