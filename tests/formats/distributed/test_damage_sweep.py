"""What ranks wrote, damaged in any way: refused in one line, or what comes of it is the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

import ckptmove
from ckptmove.errors import CkptmoveError
from tests.formats.distributed.test_dcp_beside import megatron
from tests.formats.distributed.test_fsdp_ranks import save_verl
from tests.making.distributed import save_dcp, save_hf_rank
from tests.making.zero import run, save_universal, save_zero
from tests.oracles.sameness import assert_same_tree

Damage = Callable[[Path, Random], None]


def cut(file: Path, random: Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: random.randrange(len(content))])


def flip(file: Path, random: Random) -> None:
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def blank(file: Path, random: Random) -> None:
    content = bytearray(file.read_bytes())
    at = random.randrange(len(content))
    content[at : at + 64] = bytes(len(content[at : at + 64]))
    file.write_bytes(content)


def remove(file: Path, _: Random) -> None:
    file.unlink()


def lengthen(file: Path, random: Random) -> None:
    file.write_bytes(file.read_bytes() + random.randbytes(random.randrange(1, 99)))


def dcp(folder: Path) -> Path:
    torch.manual_seed(0)
    boxes = [((0, 0), (4, 3)), ((4, 0), (4, 3)), ((8, 0), (3, 3))]
    state = {"a": torch.randn(11, 3), "b": torch.randn(5), "step": torch.tensor(7.0)}
    return save_dcp(folder, {"model": state, "epoch": 3}, {"model.a": boxes}, files=2)


def hf_shards(folder: Path) -> Path:
    torch.manual_seed(0)
    return save_hf_rank(folder, {"a": torch.randn(11, 3), "b": torch.randn(5)})


def torch_dist(folder: Path) -> Path:
    megatron(folder)
    return folder


MAKERS: dict[str, Callable[[Path], Path]] = {
    "dcp": dcp,
    "megatron": torch_dist,
    "hf shards": hf_shards,
    "verl": lambda folder: save_verl(folder, (2,)),
    "zero 2": lambda folder: save_zero(folder, run(stage=2)),
    "zero 3": lambda folder: save_zero(folder, run(stage=3, ranks=3)),
    "universal": lambda folder: save_universal(folder, run()),
}
DAMAGES = (cut, flip, blank, remove, lengthen)


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", MAKERS)
def test_damage_is_told_or_harmless(kind: str, damage: Damage, seed: int, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    whole = MAKERS[kind](tmp_path / "in")
    right, random = ckptmove.load(whole), Random(f"{kind}{seed}")
    refused, differing = list[str](), list[str]()
    for n, file in enumerate(sorted(each for each in whole.rglob("*") if each.is_file())):
        copied, out = tmp_path / f"{n}", tmp_path / f"{n}.pt"
        shutil.copytree(whole, copied)
        damage(copied / file.relative_to(whole), random)
        try:
            ckptmove.convert(copied, out)
        except CkptmoveError as error:
            refused.append(str(error))
            assert not out.exists()
            continue
        try:
            assert_same_tree(ckptmove.load(out), right)
        except AssertionError as error:
            differing.append(f"{file.relative_to(whole)}: {error}"[:300])
    assert not differing
    assert not any("\n" in each for each in refused)


def test_a_step_is_one_number(tmp_path: Path) -> None:
    folder = save_universal(tmp_path, run())
    shutil.copy(folder / "zero/embed.weight/fp32.pt", folder / "zero/embed.weight/step.pt")
    with pytest.raises(CkptmoveError, match="it is not what DeepSpeed saves"):
        ckptmove.inspect(folder)
