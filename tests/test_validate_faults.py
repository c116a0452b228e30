"""What a hostile file can't have `validate` run, and faults that it must not let pass."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from ckptmove.errors import UnsupportedError
from ckptmove.runtime.rehearsal import rehearse


class Maker(torch.nn.Module):
    """Writes a file when it is made anew."""

    path: str
    weight: torch.Tensor

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.weight = torch.ones(3)
        self.training = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    @torch.jit.export
    def __getstate__(self) -> tuple[str, torch.Tensor]:
        return (self.path, self.weight)

    @torch.jit.export
    def __setstate__(self, state: tuple[str, torch.Tensor]) -> None:
        self.path = state[0]
        self.training = False
        self.weight = torch.from_file(self.path, True, 3).fill_(7.0)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_script_that_makes_itself_is_not_loaded(tmp_path: Path) -> None:
    written, path = tmp_path / "written", tmp_path / "script.pt"
    torch.jit.script(Maker(str(written))).save(str(path))
    loaded = ckptmove.validate(path).of("reload")
    assert (loaded.outcome, "__setstate__" in loaded.title) == ("skipped", True)
    assert not written.exists()


class Sized(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0] * 2, -1) * 2


def exported(path: Path) -> Path:
    sizes = {"x": {0: torch.export.Dim("batch", min=2)}}
    program = torch.export.export(Sized(), (torch.ones(3, 4),), dynamic_shapes=sizes)
    torch.export.save(program, path)
    return path


def respelled(path: Path, said: str) -> None:
    with zipfile.ZipFile(path) as file:
        records = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in records.items():
            if name.endswith("models/model.json"):
                graph = json.loads(content, object_hook=lambda each: spelling(each, said))
                content = json.dumps(graph).encode()
            file.writestr(name, content)


def spelling(each: dict[str, Any], said: str) -> dict[str, Any]:
    return {**each, "expr_str": said} if "expr_str" in each else each


def test_a_program_of_any_size_is_its_own_model(tmp_path: Path) -> None:
    path = exported(tmp_path / "sized.pt2")
    assert rehearse(path, step="forward").ok


@pytest.mark.parametrize(
    "said",
    [
        "exec(\"open('{}', 'w')\") or 2",
        "Symbol('s77', positive=open('{}', 'w'))",
        "().__class__ or open('{}', 'w')",
        "[open('{}', 'w') for x in Tuple(1)]",
    ],
)
def test_a_program_whose_sizes_are_code_is_refused(tmp_path: Path, said: str) -> None:
    written, path = tmp_path / "written", exported(tmp_path / "sized.pt2")
    respelled(path, said.format(written))
    with pytest.raises(UnsupportedError, match="has a size that is code"):
        rehearse(path, step="forward")
    assert not written.exists()


def test_a_program_with_compiled_code_is_refused(tmp_path: Path) -> None:
    path = exported(tmp_path / "sized.pt2")
    with zipfile.ZipFile(path, "a") as file:
        root = file.namelist()[0].partition("/")[0]
        file.writestr(f"{root}/data/aotinductor/model/it.so", b"\x7fELF")
    with pytest.raises(UnsupportedError, match="compiled code"):
        rehearse(path, step="forward")
