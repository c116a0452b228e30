"""Damage in any one file of a library's folder is found by `validate`, and the file is named."""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from collections.abc import Mapping
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ckptmove import validate
from ckptmove.formats.folders.run_folders import LIKE_CHECKPOINTS
from tests.making import model_folders, training_folders

#: Files of no form that anybody could check: text and code of the user, a tokenizer's own format.
OF_ANY_FORM = (".md", ".py", ".model", ".log")
#: What may be missing, in every layout or in one: the library loads the folder without it.
OPTIONAL: Mapping[str, set[str]] = {
    "accelerate": {"custom_checkpoint_0.pkl", "scheduler.bin"},
    "deepspeed": {"latest"},
    "fairseq": {"checkpoint_best.pt", "checkpoint_last.pt"},
    "ignite": {"best_model_1_score=0.5000.pt", "training_checkpoint_1.pt"},
    "lightning": {"hparams.yaml"},
    "meta": {"consolidated.01.pth", "params.json"},
    "mmengine": {"epoch_1.pth", "last_checkpoint", "2*/vis_data/*.json"},
    "poutyne": {"checkpoint.ckpt", "checkpoint.optim", "checkpoint.randomstate"},
    "sentence_transformers": {
        *("config_sentence_transformers.json", "sentence_bert_config.json"),
        *("tokenizer.json", "tokenizer_config.json"),
    },
    "skorch": {"criterion.pt", "history.json", "optimizer.pt"},
    "timm": {"config.json", "model.safetensors", "pytorch_model.bin"},
    "timm_run": {"*.pth.tar"},
    "torchtune": {"epoch_0/params.json", "recipe_state/recipe_state.pt"},
    "trainer": {"generation_config.json", "training_args.bin"},
    "transformers": {"generation_config.json"},
}
#: What is said where a file is missing of which only the role is known, or nothing is left.
SAID_OTHERWISE = ("is a directory", "its component ", "its module ", "the weights are missing")
MAKERS = {
    **{name: training_folders for name in training_folders.FOLDERS},
    **{name: model_folders for name in model_folders.FOLDERS if name not in ("accelerate", "hub")},
}
DAMAGES = ("cut", "empty", "flipped", "removed")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a library, by its name; made once."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        if MAKERS[name] is model_folders:
            return model_folders.copy_of(name, folder / "made")
        return training_folders.FOLDERS[name](folder, "cpu")

    return make


def _flipped(content: bytes) -> bytes | None:
    """With one bit of what the file holds flipped; None if nothing could tell that."""
    at = None
    if content[:4] == b"PK\x03\x04":
        end = content.rindex(b"PK\x05\x06")
        directory = struct.unpack_from("<I", content, end + 16)[0]
        name, extra = struct.unpack_from("<HH", content, 26)
        at = 30 + name + extra  # the first record: the pickle
        assert at < directory
    elif content[8:9] == b"{":
        at = 8
    if at is None:
        return None
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def _damage(path: Path, how: str) -> bool:
    """Damage a file; whether that was possible."""
    content = path.read_bytes()
    if how == "removed":
        path.unlink()
        return True
    changed = {"cut": content[: len(content) * 3 // 5], "empty": b""}.get(how)
    if changed is None:
        changed = _flipped(content)
    if changed is None or changed == content:
        return False
    path.write_bytes(changed)
    return True


@pytest.mark.sample(6)
@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_damage_in_any_file_is_found_and_the_file_named(
    name: str, how: str, made: Any, tmp_path: Path
) -> None:
    whole = made(name)
    files = sorted(path for path in whole.rglob("*") if path.is_file())
    assert files
    for n, file in enumerate(files):
        said = file.relative_to(whole).as_posix()
        copy = shutil.copytree(whole, tmp_path / str(n))
        if file.suffix in OF_ANY_FORM or not _damage(copy / said, how):
            continue
        found = validate(copy).of("container")
        text = f"{found.title} {' '.join(found.data.get('faults', ()))}"
        if how == "removed" and any(fnmatch(said, each) for each in OPTIONAL.get(name, ())):
            assert found.outcome == "passed", (said, text)
            continue
        if how == "empty" and not said.endswith(LIKE_CHECKPOINTS) and name == "poutyne":
            assert said in found.data["not_checked"]  # nothing says any more what it was
            continue
        assert found.outcome == "failed", (said, text)
        assert said in text or (how == "removed" and any(s in text for s in SAID_OTHERWISE)), text
        shutil.rmtree(copy)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_whole_folders_pass_and_what_was_not_checked_is_named(name: str, made: Any) -> None:
    folder = made(name)
    found = validate(folder).of("container")
    assert found.outcome == "passed", str(found)
    there = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix in OF_ANY_FORM
    }
    assert set(found.data.get("not_checked", ())) == there
    if there:
        assert "of no known form, not checked" in "".join(found.details)


def test_what_the_sweep_flips_is_what_zip_has_checksums_for(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
        file.writestr("x/data.pkl", b"content")
    (tmp_path / "x.pt").write_bytes(_flipped((tmp_path / "x.pt").read_bytes()) or b"")
    with zipfile.ZipFile(tmp_path / "x.pt") as file:
        assert file.testzip() == "x/data.pkl"
    assert _flipped(json.dumps({}).encode()) is None
