"""A folder becomes one file, and that file the folder again."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmove
from ckptmove import CorruptError, RefusedError, convert, diff
from tests.conftest import RunCli, TrainingFolder
from tests.making.checkpoints import hf_trainer_folder
from tests.making.frameworks import resumed_trainer
from tests.making.model_folders import copy_of
from tests.making.trees import contents
from tests.oracles.model_folders import loaded
from tests.oracles.sameness import assert_same_tree


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_training_goes_on_where_it_was(suffix: str, tmp_path: Path) -> None:
    source = copy_of("accelerate", tmp_path / "in")
    one = tmp_path / f"one{suffix}"
    convert(source, one, trust_objects=True)
    tree: Any = ckptmove.load(one)
    assert {"model", "optimizer", "scheduler", "rng"} <= tree.keys()
    report = convert(one, f"{tmp_path}/back/", trust_objects=True)
    assert report.format == "training-folder"
    assert files(tmp_path / "back") == files(source)
    assert set(report.files) == {str(tmp_path / "back" / each) for each in files(source)}
    assert_same_tree(loaded("accelerate", tmp_path / "back"), loaded("accelerate", source))


@pytest.mark.slow
def test_a_trainer_resumes_from_the_folder_again(tmp_path: Path) -> None:
    source = hf_trainer_folder(tmp_path / "run", "cuda:0")
    for name, to in (("one.pt", "cpu"), ("one.safetensors", None)):
        convert(source, tmp_path / name, to=to, trust_objects=True)
        convert(tmp_path / name, f"{tmp_path}/back/", to="cpu", force=True, trust_objects=True)
        assert files(tmp_path / "back") == files(source)
        for other in ("config.json", "trainer_state.json"):
            assert (tmp_path / "back" / other).read_bytes() == (source / other).read_bytes()

    def resumed(folder: Path) -> dict[str, torch.Tensor]:
        return dict(resumed_trainer(folder, tmp_path / "resumed", 4).model.state_dict())

    plain = hf_trainer_folder(tmp_path / "plain")
    assert_same_tree(resumed(tmp_path / "back"), resumed(plain))


def test_the_dtype_is_that_of_the_model(tmp_path: Path) -> None:
    source = copy_of("accelerate", tmp_path / "in")
    (source / "config.json").write_text('{"dtype": "float32"}')
    convert(source, tmp_path / "one.safetensors")
    report = convert(
        tmp_path / "one.safetensors", f"{tmp_path}/back/", dtype="bf16", trust_objects=True
    )
    assert report.cast == {"float32→bfloat16": 4}
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == {"dtype": "bfloat16"}
    was, now = (torch.load(each / "optimizer.bin") for each in (source, tmp_path / "back"))
    assert_same_tree(now, was)


def test_weights_of_a_folder_are_a_plain_file(tmp_path: Path) -> None:
    source = copy_of("accelerate", tmp_path / "in")
    assert convert(source, tmp_path / "all.pt", dtype="bf16").cast == {"float32→bfloat16": 4}
    report = convert(source, tmp_path / "model.safetensors", preset="hf")
    assert report.weights is not None
    assert report.tensors == 4
    report = convert(tmp_path / "model.safetensors", f"{tmp_path}/out/")
    assert files(tmp_path / "out") == {"model.safetensors"}


def test_the_same_weights_are_written_once(tmp_path: Path) -> None:
    source = copy_of("accelerate", tmp_path / "in")
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    report = convert(source, tmp_path / "one.pt")
    assert "pytorch_model.bin" in report.left_out
    assert set(ckptmove.load(tmp_path / "one.pt")) >= {"model", "optimizer"}
    assert "pytorch_model" not in ckptmove.load(tmp_path / "one.pt")


def test_what_cannot_come_back_is_a_loss(tmp_path: Path) -> None:
    source = copy_of("accelerate", tmp_path / "in")
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), source / "program.pt")
    lost = r"would lose program\.pt, which is a torchscript file"
    with pytest.raises(RefusedError, match=lost) as caught:
        convert(source, tmp_path / "one.pt")
    assert caught.value.path == str(source)  # and not one of its files
    assert convert(source, tmp_path / "one.pt", drop="program.pt").dropped[0].name == "program.pt"


def test_damage_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    source = copy_of("accelerate", tmp_path / "in")
    whole = (source / "optimizer.bin").read_bytes()
    (source / "optimizer.bin").write_bytes(whole[:-100])
    with pytest.raises(CorruptError) as raised:
        convert(source, tmp_path / "one.pt")
    assert raised.value.path == str(source / "optimizer.bin")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def tell(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a safetensors file says of the folder that it was made of."""
    content = path.read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    said = json.loads(header)
    record = json.loads(said["__metadata__"]["ckptmove-folder"])
    change(record)
    said["__metadata__"]["ckptmove-folder"] = json.dumps(record)
    changed = json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + len(header) :])


DEEP = "/".join("e" * 33)
NAMES = (
    *("../out.json", "/out.json", "a/../../b", "", "a//b", "a/", "./a", "a\0b"),
    *(DEEP, "n" * 256, "é" * 128, "/".join(["n" * 250] * 17)),
    *(".ckptmove-journal", "a/.model.ckptmove-journal", ".x.ckptmove-tmp", "x.ckptmove-tmp/a"),
    *("model.safetensors/a", "other.json/a"),
)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"{ascii(name)[:24]}-{len(name)}")
def test_a_name_that_no_file_may_have_is_refused(name: str, tmp_path: Path) -> None:
    source = copy_of("accelerate", tmp_path / "in")
    (source / "config.json").write_text("{}")
    (source / "other.json").write_text("{}")
    convert(source, tmp_path / "one.safetensors")
    shutil.rmtree(source)

    def rename(record: dict[str, Any]) -> None:
        record["files"][name] = record["files"].pop("config.json")

    tell(tmp_path / "one.safetensors", rename)
    for dry_run in (True, False):
        with pytest.raises(
            CorruptError, match=r"not a valid file name|both a file and a"
        ) as raised:
            convert(
                tmp_path / "one.safetensors",
                f"{tmp_path}/back/",
                trust_objects=True,
                dry_run=dry_run,
            )
        assert len(str(raised.value).splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["one.safetensors"]


def test_long_names_come_back(tmp_path: Path) -> None:
    source = copy_of("accelerate", tmp_path / "in")
    names = {"/".join("d" * 32), "n" * 255, "é" * 127, "a", "b/a", "a.ckptmove"}
    for name in (*names, DEEP, ".x.ckptmove-tmp"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    report = convert(source, tmp_path / "one.safetensors")
    assert {DEEP, ".x.ckptmove-tmp"} <= {*report.left_out}
    convert(tmp_path / "one.safetensors", f"{tmp_path}/back/", trust_objects=True)
    assert names <= files(tmp_path / "back")


@pytest.mark.parametrize("keys", [[], ["model"], ["model", "0.weight"]], ids=str)
def test_parts_that_repeat_keys_are_refused(keys: list[str], tmp_path: Path) -> None:
    convert(copy_of("accelerate", tmp_path / "in"), tmp_path / "one.safetensors")
    tell(
        tmp_path / "one.safetensors",
        lambda record: record["parts"].append(["more.safetensors", keys, "safetensors"]),
    )
    with pytest.raises(CorruptError, match="mixes"):
        convert(tmp_path / "one.safetensors", f"{tmp_path}/back/", trust_objects=True)
    assert not (tmp_path / "back").exists()


def test_parts_together_are_not_far_larger_than_the_file(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    shared = torch.zeros(1 << 18)
    parts = {f"p{n}": {"w": shared} for n in range(12)}
    for name in ("optimizer", *parts):
        torch.save({"w": torch.zeros(1)}, source / f"{name}.pt")
    convert(source, tmp_path / "made.pt")
    made = torch.load(tmp_path / "made.pt", weights_only=True)
    with zipfile.ZipFile(tmp_path / "made.pt") as old:
        records = {name.partition("/")[2]: old.read(name) for name in old.namelist()}
    torch.save(made | parts, tmp_path / "new.pt")
    with zipfile.ZipFile(tmp_path / "new.pt", "a") as new:
        (root,) = {name.partition("/")[0] for name in new.namelist()}
        already = {name.partition("/")[2] for name in new.namelist()}
        for name in records.keys() - already:
            if not name.startswith("data/"):
                new.writestr(f"{root}/{name}", records[name])
    with pytest.raises(RefusedError, match="more than 8 times as many"):
        convert(tmp_path / "new.pt", f"{tmp_path}/back/")
    assert not (tmp_path / "back").exists()
    convert(tmp_path / "new.pt", f"{tmp_path}/back/", force=True)
    assert torch.load(tmp_path / "back" / "p11.pt")["w"].equal(shared)


def test_a_part_with_the_keys_of_another_is_a_loss(tmp_path: Path) -> None:
    source = copy_of("accelerate", tmp_path / "in")
    for name in ("rng_state", "rng_state_0"):
        torch.save({"cpu": torch.ones(2)}, source / f"{name}.pth")
    with pytest.raises(RefusedError, match=r"would lose rng_state_0\.pth, which has the keys of"):
        convert(source, tmp_path / "one.pt")
    convert(source, tmp_path / "one.pt", drop="rng_state_0.pth", trust_objects=True)
    convert(tmp_path / "one.pt", f"{tmp_path}/back/", trust_objects=True)
    assert files(tmp_path / "back") == files(source) - {"rng_state_0.pth"}
    loaded = torch.load(tmp_path / "back" / "rng_state.pth")
    assert_same_tree(loaded, {"cpu": torch.ones(2)})


# -- the folder of a model -------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("name", ["transformers", "peft"])
def test_the_folder_of_a_model_comes_back_with_its_files(
    name: str, suffix: str, tmp_path: Path
) -> None:
    source = copy_of(name, tmp_path / "in")
    (source / "tokenizer").mkdir()
    (source / "tokenizer" / "vocab.txt").write_text("a b c")
    file = tmp_path / f"one{suffix}"
    plain = convert(source, file)
    assert plain.left_out == ()
    report = convert(file, f"{tmp_path}/back/")
    assert report.format in ("safetensors", "torch-zip")
    was, now = contents(source), contents(tmp_path / "back")
    pickled = {each for each in was if each.endswith(".bin")}
    assert was.keys() == now.keys()
    assert {each for each in was if was[each] != now[each]} <= pickled
    assert_same_tree(loaded(name, tmp_path / "back"), loaded(name, source))


def test_a_bare_file_tells_of_no_folder(tmp_path: Path) -> None:
    source = copy_of("transformers", tmp_path / "in")
    bare: list[dict[str, Any]] = [{"bare": True}, {"preset": "hf"}, {"select": "model"}]
    for n, options in enumerate(bare):
        convert(source, tmp_path / f"{n}.safetensors", **options)
        convert(tmp_path / f"{n}.safetensors", f"{tmp_path}/back-{n}/")
        assert files(tmp_path / f"back-{n}") == {"model.safetensors"}


def test_a_part_within_another_stays_where_that_is_dropped(tmp_path: Path) -> None:
    source = tmp_path / "in"
    (source / "a").mkdir(parents=True)
    torch.save({"b": torch.ones(2)}, source / "optimizer.pt")
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), source / "rng_state.pth")
    torch.save({"w": torch.ones(3)}, source / "rng_state_1.pth")  # at rng.1, within rng
    convert(source, tmp_path / "one.pt", drop="rng_state.pth")
    convert(tmp_path / "one.pt", f"{tmp_path}/back/")
    assert files(tmp_path / "back") == {"optimizer.pt", "rng_state_1.pth"}
    assert torch.load(tmp_path / "back" / "rng_state_1.pth")["w"].tolist() == [1, 1, 1]


def test_an_index_beside_a_file_of_its_name_is_a_loss(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    torch.save({"b": torch.ones(2)}, source / "optimizer.pt")
    for name in ("x.safetensors", "x-00001-of-00001.safetensors"):
        save_file({"w": torch.ones(3)}, source / name)
    where = {"weight_map": {"w": "x-00001-of-00001.safetensors"}}
    (source / "x.safetensors.index.json").write_text(json.dumps(where))
    with pytest.raises(RefusedError, match=r"come back as x\.safetensors, which is there too"):
        convert(source, tmp_path / "one.pt")
    convert(source, tmp_path / "one.pt", drop="x.safetensors.index.json")
    convert(tmp_path / "one.pt", f"{tmp_path}/back/")
    assert files(tmp_path / "back") == {"optimizer.pt", "x.safetensors"}


@pytest.mark.parametrize("way", ["folder", "one.pt", "one.safetensors"])
@pytest.mark.parametrize("name", ["deepspeed", "meta", "ignite"])
def test_the_layout_of_its_library_comes_back(
    name: str, way: str, training_folder: TrainingFolder, tmp_path: Path
) -> None:
    source = training_folder(name, "cuda:0")
    (source / "consolidated.01.pth").unlink(missing_ok=True)
    there = f"{tmp_path}/there/" if way == "folder" else tmp_path / way
    convert(source, there)
    convert(there, f"{tmp_path}/back/", format="torch-zip" if way == "folder" else None)
    assert contents(tmp_path / "back").keys() == contents(source).keys()
    assert diff(source, tmp_path / "back").equal
    if way == "folder":
        assert ckptmove.inspect(there).tensors
        assert not list(Path(there).rglob("*.pth"))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_file_equals_the_folder_that_it_was_made_of(suffix: str, tmp_path: Path) -> None:
    source = copy_of("accelerate", tmp_path / "in")
    one = tmp_path / f"one{suffix}"
    convert(source, one, trust_objects=True)
    assert diff(source, one).equal
    assert diff(one, source).equal
    assert ckptmove.validate(one, against=source).ok


def test_files_that_tell_of_other_folders_differ(tmp_path: Path) -> None:
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    convert(copy_of("accelerate", tmp_path / "in"), one, trust_objects=True)
    shutil.copy(one, other)
    tell(other, lambda record: record["files"].update({"more.json": ""}))
    assert [each.name for each in diff(one, other).differences] == ["__metadata__.ckptmove-folder"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_averages_are_not_taken_for_the_model(name: str, tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "run").mkdir()
    average = {"w": torch.ones(2)}
    torch.save({"model": None, "ema": average, "epoch": 1}, tmp_path / "run" / name)
    torch.save({"state": {}, "param_groups": []}, tmp_path / "run" / "optimizer.pt")
    one = tmp_path / "one.safetensors"
    asked = ("convert", tmp_path / "run", one, "--select", "model")
    assert "holds no weights of a model" in run_cli(*asked, exit=4).stderr
    assert not one.exists()
    (section,) = {each.section for each in ckptmove.inspect(tmp_path / "run").tensors}
    assert section == "ema"
    convert(tmp_path / "run", one, weights="ema", bare=True)
    assert_same_tree(load_file(one), average)
    torch.save({"model": {"w": torch.zeros(2)}, "ema": average}, tmp_path / "run" / name)
    convert(tmp_path / "run", one, weights="model", bare=True, force=True)
    assert_same_tree(load_file(one), {"w": torch.zeros(2)})


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".dcp/"])
def test_a_second_checkpoint_of_a_model_folder_is_a_loss(suffix: str, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "config.json").write_text("{}")
    torch.save({"rate": 0.1}, source / "training_args.bin")
    (source / "checkpoint-2").mkdir()
    save_file({"w": torch.ones(1)}, source / "checkpoint-2" / "model.safetensors")
    save_file({"w": torch.ones(2)}, source / "model.safetensors")
    save_file({"head": torch.ones(3)}, source / "custom.safetensors")
    asked: Any = {"format": "dcp"} if suffix == ".dcp/" else {}
    one = f"{tmp_path}/one{suffix}"
    with pytest.raises(RefusedError, match=r"custom\.safetensors"):
        convert(source, one, **asked)
    assert not Path(one).exists()
    report = convert(source, one, drop="custom.safetensors", **asked)
    assert [each.name for each in report.dropped] == ["custom.safetensors"]
    assert ckptmove.load(one).keys() == {"w"}
    selected = convert(source, one, select="model", force=True, **asked)
    assert not selected.dropped


def test_a_verdict_names_a_second_checkpoint_of_a_model_folder(tmp_path: Path) -> None:
    source, one = tmp_path / "in", tmp_path / "one.safetensors"
    source.mkdir()
    (source / "config.json").write_text("{}")
    torch.save({"rate": 0.1}, source / "training_args.bin")
    save_file({"w": torch.ones(2)}, source / "model.safetensors")
    torch.save({"w": torch.ones(2)}, source / "pytorch_model.bin")
    save_file({"w": torch.ones(2)}, one)
    assert ckptmove.diff(source, one).equal
    assert ckptmove.validate(source, against=one).ok
    assert "custom" not in str(ckptmove.validate(source).to_json())
    save_file({"head": torch.ones(3)}, source / "custom.safetensors")
    for a, b in ((source, one), (one, source)):
        found = ckptmove.diff(a, b)
        assert [(each.kind, each.name) for each in found.differences] == [
            ("not compared", "custom.safetensors")
        ]
    assert ckptmove.diff(source, one, select="w").equal
    (container, *_) = ckptmove.validate(source).checks
    said = "custom.safetensors (safetensors, 1 tensor) is no part of it: checked by itself"
    assert container.outcome == "passed"
    assert any(said in each for each in container.details)
    assert not ckptmove.validate(source, against=one).ok
    assert ckptmove.validate(one, against=source, subset=True).ok
    data = bytearray((source / "custom.safetensors").read_bytes())
    data[8:] = data[8:].replace(b"[0,12]", b"[0,16]")
    (source / "custom.safetensors").write_bytes(data)
    assert not ckptmove.validate(source).ok
