"""Folders of models: found by the names of their files, and converted as a whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmove
from ckptmove import InputError, RefusedError, UnsupportedError, UsageError, convert, inspect
from tests.conftest import RunCli
from tests.making.checkpoints import hf_trainer_folder
from tests.making.frameworks import resumed_trainer
from tests.making.staging import interrupted, journal_of
from tests.oracles.sameness import assert_same_tree

WEIGHTS = {"a.weight": torch.arange(300.0), "b.bias": torch.full((200,), -0.0)}


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder in a folder, however deep: links are followed."""
    found: dict[str, bytes | None] = {}
    for path in sorted(_walked(folder)):
        found[path.relative_to(folder).as_posix()] = None if path.is_dir() else path.read_bytes()
    return found


def in_safetensors(names: Iterable[str]) -> set[str]:
    """The names of files once the optimizer among them is converted."""
    return {name.replace("optimizer.pt", "optimizer.pt.safetensors") for name in names}


def _walked(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        yield path
        if path.is_dir():
            yield from _walked(path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with weights and what else there may be."""
    folder = tmp_path / "model"
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "empty" / "more").mkdir(parents=True)
    save_file(WEIGHTS, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text("{}")
    (folder / "none.txt").touch()
    (folder / "sub" / "deep" / "vocab.txt").write_bytes(os.urandom(70_000))
    (folder / "sub" / "model.json").write_bytes(b"not looked at")
    torch.save({"state": {}}, folder / "optimizer.pt")
    (folder / os.fsdecode(b"\xff\n")).write_text("odd")
    return folder


# -- which file it is ------------------------------------------------------------------------------

KNOWN = [
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
    *("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"),
    *("adapter_model.safetensors", "adapter_model.bin"),
]


def put(path: Path) -> None:
    """Weights under one of these names, with parts of their own if it is an index."""
    if path.suffix == ".json":
        inner = path.with_suffix("").with_suffix("")
        part = inner.with_name(f"{inner.stem}-00001-of-00001{inner.suffix}")
        put(part)
        path.write_text(f'{{"weight_map": {{"a.weight": "{part.name}", "b.bias": "{part.name}"}}}}')
    elif path.suffix == ".safetensors":
        save_file(WEIGHTS, path)
    else:
        torch.save(WEIGHTS, path)


@pytest.mark.parametrize("n", range(len(KNOWN)))
def test_the_weights_are_found(n: int, tmp_path: Path) -> None:
    for name in (*KNOWN[n:], "config.json", "training_args.bin"):
        if not (tmp_path / name).exists():
            put(tmp_path / name) if name in KNOWN else (tmp_path / name).touch()
    manifest = inspect(tmp_path)
    assert manifest.path == str(tmp_path / KNOWN[n])
    assert {entry.name for entry in manifest.tensors} == WEIGHTS.keys()
    same = "is used as the weights" in "".join(manifest.warnings)
    assert same is (n not in (3, 5, 7))


@pytest.mark.parametrize("name", ["x.pt", "epoch=3.ckpt", "x.safetensors", "x.bin.index.json"])
def test_the_only_file_is_taken(name: str, tmp_path: Path) -> None:
    put(tmp_path / name)
    for other in ("notes.txt", "training_args.json"):
        (tmp_path / other).touch()
    assert inspect(tmp_path).path == str(tmp_path / name)
    assert_same_tree(ckptmove.load(tmp_path), WEIGHTS)
    torch.save([torch.ones(2)], tmp_path / "other.pt")
    if not name.endswith(".json"):  # of an index alone it is clear that it is the weights
        both = {Path(name).stem: WEIGHTS, "other": [torch.ones(2)]}
        assert_same_tree(ckptmove.load(tmp_path), dict(sorted(both.items())))


STRANGE = {
    "__0_0.distcp": "its save did not finish",
    "mp_rank_00_model_states.pt": "DeepSpeed",
    "global_step500": "DeepSpeed",
    "latest_checkpointed_iteration.txt": "Megatron-LM",
    "saved_model.pb": "SavedModel",
    "data.pkl": "unpacked checkpoint",
    "README.md": "without any file that usually holds weights",
}


@pytest.mark.parametrize("name", STRANGE)
def test_other_folders_are_named(name: str, tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "in" / name).mkdir(parents=True)
    for verb in (inspect, ckptmove.load, lambda path: convert(path, tmp_path / "out")):
        with pytest.raises(UnsupportedError, match=STRANGE[name]) as raised:
            verb(tmp_path / "in")
        assert raised.value.path == str(tmp_path / "in")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_public_folders_are_named(corpus: Path) -> None:
    found = inspect(corpus / "Lightning-AI+pytorch-lightning__dcp_dir")
    assert (found.format, set(found.divisions.values())) == ("dcp", {"rows/2"})


# -- converted as a whole --------------------------------------------------------------------------


def test_everything_else_is_copied(model: Path, tmp_path: Path) -> None:
    before = tree(model)
    (model / "config.json").chmod(0o640)
    told: list[int] = []
    report = convert(model, tmp_path / "out", progress=told.append)
    assert tree(model) == before
    after = tree(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == WEIGHTS.keys()
    assert after.keys() == in_safetensors(before)
    same = before.keys() - {"model.safetensors", "optimizer.pt"}
    assert {name: before[name] for name in same} == {name: after[name] for name in same}
    files = {name: len(content) for name, content in after.items() if content is not None}
    assert report.files == {str(tmp_path / "out" / name): size for name, size in files.items()}
    assert report.bytes_written == sum(files.values()) == sum(told)
    assert report.nbytes == sum(len(content or b"") for content in before.values())
    assert (report.source, report.format) == (str(model), "safetensors")
    assert (tmp_path / "out" / "config.json").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir() if path.name[0] == "."] == []


def test_nothing_is_written_in_a_dry_run(model: Path, tmp_path: Path) -> None:
    report = convert(model, tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()
    convert(model, tmp_path / "out")
    files = {str(path) for path in _walked(tmp_path / "out") if path.is_file()}
    assert set(report.files) == files


def test_the_same_bytes_each_time(model: Path, tmp_path: Path) -> None:
    for out in ("one", "two"):
        convert(model, tmp_path / out, max_shard_size=900)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert "model-00002-of-00002.safetensors" in tree(tmp_path / "one")


@pytest.mark.parametrize(
    ("name", "format", "expected"),
    [
        ("pytorch_model.bin", None, "model.safetensors"),
        ("pytorch_model.bin.index.json", None, "model.safetensors"),
        ("model.safetensors", "torch-zip", "pytorch_model.bin"),
        ("diffusion_pytorch_model.bin", None, "diffusion_pytorch_model.safetensors"),
        ("adapter_model.safetensors", "torch-zip", "adapter_model.bin"),
        ("last.ckpt", None, "last.safetensors"),
    ],
)
def test_the_weights_get_the_usual_name(
    name: str, format: str | None, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    put(tmp_path / "in" / name)
    convert(tmp_path / "in", tmp_path / "out", format=format)
    assert tree(tmp_path / "out").keys() == {expected}
    assert_same_tree(ckptmove.load(tmp_path / "out"), WEIGHTS)


def test_the_same_weights_in_another_form_stay_behind(model: Path, tmp_path: Path) -> None:
    put(model / "pytorch_model.bin.index.json")
    put(model / "adapter_model.bin")
    report = convert(model, tmp_path / "out", format="torch-zip")
    assert report.warnings == (
        "model.safetensors is used as the weights; pytorch_model-00001-of-00001.bin "
        "and 1 more hold the same tensors",
    )
    after = tree(tmp_path / "out").keys()
    assert after == {*tree(model), "pytorch_model.bin"} - {
        "model.safetensors",
        "pytorch_model.bin.index.json",
        "pytorch_model-00001-of-00001.bin",
    }
    assert report.parts["optimizer.pt"] == ("optimizer.pt",)


def test_the_old_shards_stay_behind(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    put(tmp_path / "in" / "model.safetensors.index.json")
    convert(tmp_path / "in", tmp_path / "out")
    assert tree(tmp_path / "out").keys() == {"model.safetensors"}


def test_options_speak_of_the_weights(model: Path, tmp_path: Path) -> None:
    report = convert(model, tmp_path / "out", select="a.*", dtype="bf16", rename="s/^a/c/")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {"c.weight": torch.bfloat16}
    assert report.left_out == ("optimizer.pt", "b.bias")
    assert (tmp_path / "out" / "config.json").exists()


def test_a_file_gets_all_of_a_training(model: Path, tmp_path: Path) -> None:
    (model / os.fsdecode(b"\xff\n")).rename(model / "odd")
    for out in ("out.safetensors", "out.pt"):
        report = convert(model, tmp_path / out)
        assert list(report.files) == [str(tmp_path / out)]
        expected = {"model": WEIGHTS, "optimizer": {"state": {}}}
        assert_same_tree(ckptmove.load(tmp_path / out), expected)
    (model / "optimizer.pt").unlink()
    convert(model, tmp_path / "out.pt", force=True)
    assert_same_tree(ckptmove.load(tmp_path / "out.pt"), WEIGHTS)


def test_a_file_into_a_folder(model: Path, tmp_path: Path) -> None:
    for format, name in (("safetensors", "model.safetensors"), ("torch-zip", "pytorch_model.bin")):
        convert(model / "model.safetensors", f"{tmp_path / format}/", format=format)
        assert tree(tmp_path / format).keys() == {name}
        assert_same_tree(ckptmove.load(tmp_path / format), WEIGHTS)


def test_torch_writes_no_shards(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="takes no --max-shard-size"):
        convert(model, tmp_path / "out", format="torch-zip", max_shard_size="1GB")


# -- what can't be copied, and where ---------------------------------------------------------------


def test_links_to_files_become_copies(model: Path, tmp_path: Path) -> None:
    (model / "file").symlink_to("sub/deep/vocab.txt")
    (model / "model.safetensors").rename(tmp_path / "blob")
    (model / "model.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(UnsupportedError, match="leads outside its folder"):
        convert(model, tmp_path / "out")
    convert(model, tmp_path / "out", follow_links=True)
    after = tree(tmp_path / "out")
    assert after["file"] == after["sub/deep/vocab.txt"]
    assert not any(path.is_symlink() for path in _walked(tmp_path / "out"))


def test_links_to_folders_are_not_followed_and_told(model: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x").write_text("x")
    before = tree(model)
    for name, target in (
        ("folder", tmp_path / "elsewhere"),
        ("here", "."),
        ("above", "../../model"),
    ):
        (model / "sub" / name).symlink_to(target)
    report = convert(model, tmp_path / "out")
    assert report.warnings == tuple(
        f"sub/{name} is a link to a folder and was not followed"
        for name in ("above", "folder", "here")
    )
    assert tree(tmp_path / "out").keys() == in_safetensors(before)


def test_a_pipe_is_refused(model: Path) -> None:
    os.mkfifo(model / "sub" / "pipe")
    with pytest.raises(UnsupportedError, match="is no file, and can't be copied") as raised:
        convert(model, model.parent / "out")
    assert raised.value.path == str(model / "sub" / "pipe")
    assert [path.name for path in model.parent.iterdir()] == ["model"]


def test_a_dead_link_is_refused(model: Path) -> None:
    (model / "dead").symlink_to("nowhere")
    with pytest.raises(InputError, match="No such file") as raised:
        convert(model, model.parent / "out")
    assert raised.value.path == str(model / "dead")
    assert [path.name for path in model.parent.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "out", ["model/", "model/sub/out", "model/../model/", ".", "link/", "link/out/"]
)
def test_folders_must_lie_apart(
    out: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(model)
    before = tree(model)
    for force in (False, True):
        for dry_run in (False, True):
            with pytest.raises(RefusedError, match=r"is inside the|is the source itself"):
                convert(model, out, force=force, dry_run=dry_run)
    assert tree(model) == before


def test_an_existing_folder_is_replaced_only_by_force(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(RefusedError, match="exists"):
        convert(model, tmp_path / "out")
    assert tree(tmp_path / "out").keys() == {"precious"}
    for dry_run in (True, False):
        with pytest.raises(RefusedError, match="'precious' in it would be gone"):
            convert(model, tmp_path / "out", force=True, dry_run=dry_run)
    (tmp_path / "out" / "precious").rename(tmp_path / "out" / "model-00007-of-00009.safetensors")
    convert(model, tmp_path / "out", force=True)
    convert(model, tmp_path / "out", force=True)
    assert tree(tmp_path / "out").keys() == in_safetensors(tree(model))


def test_another_file_of_that_name_is_not_overwritten(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").rename(model / "x.safetensors")
    (model / "x-00001-of-00002.safetensors").mkdir()
    with pytest.raises(RefusedError, match="would be called 'x-00001-of-00002"):
        convert(model, tmp_path / "out", max_shard_size=1200)
    assert not (tmp_path / "out").exists()


def test_interrupted_changes_are_undone_first(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    put(model / "pytorch_model.bin.index.json")
    part = model / "pytorch_model-00001-of-00001.bin"
    torch.save({"a": torch.ones(9)}, model / "sub" / "rng.pth")
    changed = [part, model / "optimizer.pt", model / "sub" / "rng.pth"]
    torch.save({"b": torch.ones(9)}, changed[1])
    before = [path.read_bytes() for path in changed]
    for path in changed:
        interrupted(path, "cuda:0")
        assert journal_of(path).exists()
    report = convert(model, tmp_path / "out")
    note = "an interrupted in-place change was undone first"
    assert set(report.warnings) == {f"{path.relative_to(model)}: {note}" for path in changed}
    assert [path.read_bytes() for path in changed] == before
    after = tree(tmp_path / "out")
    assert_same_tree(
        ckptmove.load(tmp_path / "out" / "optimizer.pt.safetensors"), {"b": torch.ones(9)}
    )
    assert not [name for name in after if "journal" in name]
    assert_same_tree(ckptmove.load(tmp_path / "out")["model"], WEIGHTS)
    interrupted(part, "cuda:0")
    assert f"{part.name}: {note}" in inspect(model).warnings


def test_the_only_file_is_settled(tmp_path: Path) -> None:
    put(tmp_path / "x.pt")
    interrupted(tmp_path / "x.pt", "cuda:0")
    assert inspect(tmp_path).verdict == "uniform cpu"
    assert not journal_of(tmp_path / "x.pt").exists()


# -- real tools ------------------------------------------------------------------------------------


def tiny(name: str) -> Any:
    """A model of each family, in evaluation mode."""
    transformers = pytest.importorskip("transformers")
    small: dict[str, Any] = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0}
    many = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    if name == "GPT2LMHeadModel":
        config = transformers.GPT2Config(**small, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    elif name == "LlamaForCausalLM":
        config = transformers.LlamaConfig(**small, **many, intermediate_size=32)
    else:
        config = transformers.BertConfig(**small, **many, intermediate_size=32)
    return getattr(transformers, name)(config).eval()


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM"])
def test_transformers_loads_it(name: str, tmp_path: Path) -> None:
    model, tokens = tiny(name), torch.arange(12)[None]
    expected = model(tokens).logits
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    torch.save(model.state_dict(), tmp_path / "bin")
    shutil.copytree(tmp_path / "one", tmp_path / "torch")
    shutil.move(tmp_path / "bin", tmp_path / "torch" / "pytorch_model.bin")
    (tmp_path / "torch" / "model.safetensors").unlink()
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"max_shard_size": "8KB"},
        {"format": "torch-zip"},
        {"bare": True, "max_shard_size": "8KB"},
    )
    for source in ("one", "many", "torch"):
        for n, way in enumerate(ways):
            out = tmp_path / f"{source}-{n}"
            convert(tmp_path / source, out, **way)
            again, info = type(model).from_pretrained(out, output_loading_info=True)
            assert not any(info[key] for key in ("missing_keys", "unexpected_keys")), info
            assert torch.equal(again.eval()(tokens).logits, expected)


@pytest.mark.slow
def test_a_trainer_resumes_from_it(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    source = hf_trainer_folder(tmp_path / "run")
    convert(source, tmp_path / "safe", max_shard_size="1KB")
    convert(tmp_path / "safe", tmp_path / "checkpoint-2", format="torch-zip", trust_objects=True)
    names = {path.name for path in source.iterdir()} - {"model.safetensors"}
    assert {path.name for path in (tmp_path / "checkpoint-2").iterdir()} - names == {
        "pytorch_model.bin"
    }

    def resumed(folder: Path) -> dict[str, torch.Tensor]:
        fresh = transformers.GPT2LMHeadModel.from_pretrained(folder)
        return dict(resumed_trainer(folder, tmp_path / "resumed", 4, fresh).model.state_dict())

    assert_same_tree(resumed(tmp_path / "checkpoint-2"), resumed(source))


def test_the_command_line(model: Path, run_cli: RunCli) -> None:
    done = run_cli("convert", "model", "out", "--dry-run", exit=0)
    assert "would write out as safetensors: 2 tensors" in done.stdout
    done = run_cli("convert", "model", "out", exit=0)
    assert " in 7 files in " in done.stdout
    assert run_cli("inspect", "out", exit=0).stderr == ""
    done = run_cli("convert", "model", "model/out/", exit=4)
    assert done.stderr == "ckptmove: model/out/: the destination is inside the source\n"
