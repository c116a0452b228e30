"""Names that lead elsewhere on one system or another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ckptmove
from ckptmove.sources.place import is_url
from ckptmove.system.names import folds_case, one_case, why_no_name, without_slash

_ROOT = Path(__file__).parents[2]
_ELSEWHERE = ["..", "a/../b", "/etc/x", "", "a//b", "a\0b"]
_ON_WINDOWS = [
    *("C:model.bin", "C:/x", "\\\\host\\share\\x", "..\\x", "a\\b", "a:stream", "a*", "a?", 'a"'),
    *("CON", "nul.pt", "sub/Aux.safetensors", "COM1", "lpt9.bin", "CONIN$", "COM¹.pt", "NUL .pt"),
    *("ends.", "ends ", "sub./x", "tab\tname"),
]
_FINE = ["run.pt", "sub/run.pt", ".hidden", "console.pt", "com10.pt", "naïve.pt", "a b.pt"]


@pytest.mark.parametrize("name", _ELSEWHERE)
def test_elsewhere_everywhere(name: str) -> None:
    assert why_no_name(name, windows=False)
    assert why_no_name(name, windows=True)


@pytest.mark.parametrize("name", _ON_WINDOWS)
def test_elsewhere_on_windows(name: str) -> None:
    assert why_no_name(name, windows=True)
    assert not why_no_name(name, windows=False)


@pytest.mark.parametrize("name", _FINE)
def test_fine_everywhere(name: str) -> None:
    assert not why_no_name(name, windows=False)
    assert not why_no_name(name, windows=True)


def test_a_drive_is_no_url() -> None:
    for path in ("C:/run.pt", "C:\\run.pt", "C://run.pt", "\\\\host\\share\\run.pt", "//host/x"):
        assert not is_url(path)


def test_slashes_at_the_end() -> None:
    assert [without_slash(each) for each in ("a/b//", "/", "a", "")] == ["a/b", "/", "a", ""]


@pytest.mark.parametrize("name", ["..\\x.safetensors", "sub\\x.safetensors", "../x.safetensors"])
def test_an_index_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ckptmove.InputError):
        ckptmove.inspect(index)


def test_case(tmp_path: Path) -> None:
    assert not folds_case(str(tmp_path))
    (tmp_path / "Run.pt").touch()
    assert not folds_case(str(tmp_path))
    assert one_case("Cafe\u0301/Run.pt") == one_case("caf\xe9/RUN.PT")


_BATCH = """
import sys
import ckptmove, concurrent.futures, pickle
sys.platform = sys.argv[3]
with concurrent.futures.ThreadPoolExecutor(1) as executor:
    for each in ckptmove.batch("convert", *sys.argv[1:3], executor=executor):
        print(each.name, each.outcome, each.reason)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(("system", "kept"), [("linux", 2), ("darwin", 0)])
def test_two_outputs_that_differ_by_case(tmp_path: Path, system: str, kept: int) -> None:
    """Where case may be folded, neither takes the name of the other."""
    safetensors = pytest.importorskip("safetensors.numpy")
    numpy = pytest.importorskip("numpy")
    src, dst = tmp_path / "src", tmp_path / "dst"
    src.mkdir()
    dst.mkdir()
    for name in ("run.safetensors", "RUN.safetensors"):
        safetensors.save_file({"w": numpy.zeros(3)}, src / name)
    said = subprocess.run(
        [sys.executable, "-c", _BATCH, src, dst, system],
        capture_output=True,
        text=True,
        cwd=_ROOT,
        check=False,
    )
    assert said.stdout.count(" done ") == kept, said
    assert said.stdout.count("would have the same name in the destination") == 2 - kept
    assert len([*dst.glob("*.safetensors")]) == kept
