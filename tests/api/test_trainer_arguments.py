"""What Hugging Face's Trainer says of a run: `training_args.bin`, there and back without a flag."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove

KIND = "accelerate.utils.dataclasses DistributedType"


def saved(path: Path, data: bytes) -> Path:
    """A plain pickle."""
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def arguments() -> Any:
    transformers = pytest.importorskip("transformers")
    accelerate = pytest.importorskip("accelerate")
    made = transformers.TrainingArguments(
        "out", use_cpu=True, report_to=[], optim="sgd", fsdp="", warmup_steps=3
    )
    made.distributed_state = accelerate.PartialState(cpu=True)
    return made


def test_they_come_back_without_a_flag(arguments: Any, tmp_path: Path) -> None:
    torch.save(arguments, tmp_path / "training_args.bin")
    assert ckptmove.inspect(tmp_path / "training_args.bin").unknown_callables == ()
    ckptmove.convert(tmp_path / "training_args.bin", tmp_path / "x.safetensors", strict=True)
    ckptmove.convert(tmp_path / "x.safetensors", tmp_path / "out.pt")
    made = torch.load(tmp_path / "out.pt", weights_only=False)
    assert type(made) is type(arguments)
    assert made.to_dict() == arguments.to_dict()
    assert repr(made.distributed_state) == repr(arguments.distributed_state)


#: What an enum does with these: makes another class, changes the member that all share, asks the
#: object it is given for its hash.
MISUSES: dict[str, Callable[[], bytes]] = {
    "a class is made": lambda: f"c{KIND.replace(' ', chr(10))}\n(Vname\nV a\ntR.".encode(),
    "a member is changed": lambda: f"c{KIND.replace(' ', chr(10))}\n(VNO\ntR}}Vx\nK\x01sb.".encode(
        "latin-1"
    ),
    "an object is given": lambda: f"c{KIND.replace(' ', chr(10))}\n((lVNO\natR.".encode(),
    "it is made empty": lambda: b"\x80\x02c" + KIND.replace(" ", "\n").encode() + b"\n(VNO\nt\x81.",
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misuse_is_an_unknown_callable(misuse: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "in.pkl", MISUSES[misuse]())
    assert KIND.replace(" ", ".") in ckptmove.inspect(path).unknown_callables


def test_arguments_that_are_called_are_unknown(tmp_path: Path) -> None:
    """Only made empty: `TrainingArguments(...)` runs `__post_init__`, which logs in and sets up."""
    data = b"ctransformers.training_args\nTrainingArguments\n(Vout\ntR."
    path = saved(tmp_path / "in.pkl", data)
    names = ckptmove.inspect(path).unknown_callables
    assert names == ("transformers.training_args.TrainingArguments",)


def test_the_right_use_is_known(tmp_path: Path) -> None:
    data = f"c{KIND.replace(' ', chr(10))}\n(VNO\ntR.".encode()
    pytest.importorskip("accelerate")
    assert pickle.loads(data).value == "NO"
    assert ckptmove.inspect(saved(tmp_path / "in.pkl", data)).unknown_callables == ()
