"""The makers and the fixtures, tested themselves."""

from __future__ import annotations

import pickletools
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.serialization import _package_registry

from tests.conftest import RunCli, corpus_files, corpus_folder, examples
from tests.making.checkpoints import (
    MAKERS,
    UNLABELLED,
    hf_trainer_folder,
    kept_on_cpu,
    lightning_checkpoint,
    rezip,
    save,
    save_by_cpp,
    save_tagged,
    sparse_zip64,
    squeeze,
    tagging,
)
from tests.making.strategies import Checkpoint, checkpoint_trees
from tests.oracles.readers import (
    assert_same_checkpoint,
    assert_same_loads,
    cpp_unpickler_accepts,
    inert_tree,
    labels,
    load,
    loads_safely,
    pid_locations,
    storage_records,
)
from tests.oracles.sameness import assert_same_tree


def literals(path: Path) -> Counter[object]:
    """How often each string is spelled out in the pickle."""
    with zipfile.ZipFile(path) as archive:
        data = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    return Counter(arg for opcode, arg, _ in pickletools.genops(data) if "UNICODE" in opcode.name)


# Makers


@pytest.mark.sample(50)
@pytest.mark.parametrize("name", MAKERS)
def test_a_maker_saves_under_the_tags_given(name: str, tmp_path: Path) -> None:
    saved = MAKERS[name]()
    tags = save_tagged(saved, tmp_path / "made.pt", "cuda:0", kept_on_cpu(saved))
    assert dict(pid_locations(tmp_path / "made.pt")) == tags
    assert set(tags.values()) <= {"cpu", "cuda:0"}


@pytest.mark.sample(50)
@pytest.mark.parametrize("name", MAKERS)
def test_a_maker_makes_the_same_each_time(name: str, tmp_path: Path) -> None:
    for turn in ("first", "second"):
        (tmp_path / turn).mkdir()
        save(tmp_path / turn / "made.pt", MAKERS[name]())
    first, second = ((tmp_path / turn / "made.pt").read_bytes() for turn in ("first", "second"))
    assert first == second


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", MAKERS)
def test_two_tags_of_one_object_are_the_same_checkpoint(name: str, tmp_path: Path) -> None:
    saved = MAKERS[name]()
    one, other = save(tmp_path / "a.pt", saved), save(tmp_path / "b.pt", saved, "cuda:1")
    assert_same_checkpoint(one, other, {"cuda:0": "cuda:1"}, trust=True)


@pytest.mark.sample(60)
@pytest.mark.parametrize("name", sorted(MAKERS.keys() - UNLABELLED))
def test_labels_are_what_was_tagged(name: str, tmp_path: Path) -> None:
    path = save(tmp_path / "made.pt", MAKERS[name](), "cuda:3")
    assert set(labels(path).values()) <= {"cuda:3", "meta"} | own_labels(name)


def own_labels(name: str) -> set[str]:
    """Wrappers store their own device, whatever the tags of their parts."""
    own = {"wrapper_subclass": {"cpu"}, "dtensor_state_dict": {"cpu"}}
    return {**own, "wrapper_subclass_on_cuda": {"cuda:0"}}.get(name, set())


def test_indexed_tags_are_spelled_at_each_use_and_constants_once(tmp_path: Path) -> None:
    saved = MAKERS["linear_state_dict"]()
    for tag, spelled in {"cuda:0": 2, "xpu:0": 2, "cpu": 1, "mps": 1, "meta": 1}.items():
        assert literals(save(tmp_path / "made.pt", saved, tag))[tag] == spelled


@pytest.mark.parametrize("name", ["cpu_string_first", "cpu_string_last", "rng_state_file"])
def test_the_users_cpu_string_is_the_tags_own(name: str, tmp_path: Path) -> None:
    assert literals(save(tmp_path / "made.pt", MAKERS[name](), "cpu"))["cpu"] == 1


def test_a_function_tags_each_storage_and_keep_cpu_outranks_it(tmp_path: Path) -> None:
    saved = [torch.ones(1), torch.ones(2), torch.ones(3), torch.ones(4)]
    sizes = {4: "cuda:1", 8: None, 12: "mps", 16: "cuda:0"}
    tags = save_tagged(
        saved, tmp_path / "made.pt", lambda s: sizes[s.nbytes()], lambda s: s.nbytes() == 16
    )
    assert tags == {"0": "cuda:1", "1": "cpu", "2": "mps", "3": "cpu"}
    assert pid_locations(tmp_path / "made.pt") == list(tags.items())


def test_options_reach_torch_save(tmp_path: Path) -> None:
    legacy = save(tmp_path / "a.pt", torch.ones(1), _use_new_zipfile_serialization=False)
    assert b"cuda:0" in legacy.read_bytes()
    assert not zipfile.is_zipfile(legacy)


def test_the_registry_is_restored_when_saving_fails() -> None:
    before = list(_package_registry)
    with pytest.raises(ZeroDivisionError), tagging("cuda:0"):
        raise ZeroDivisionError
    assert before == _package_registry


@pytest.mark.parametrize(
    ("name", "on_cpu"),
    [
        ("adam_mixed_capturable", {"optimizer.state.1.step"}),
        ("adam_capturable", set()),
        ("adam_fused", set()),
        ("asgd", set()),
        (
            "nadam",
            {f"optimizer.state.{i}.{key}" for i in range(6) for key in ("step", "mu_product")},
        ),
        ("rng_state_file", {"cpu", "cuda.0"}),
    ],
)
def test_what_training_keeps_on_the_cpu(name: str, on_cpu: set[str], tmp_path: Path) -> None:
    saved = MAKERS[name]()
    found = labels(save(tmp_path / "made.pt", saved, keep_cpu=kept_on_cpu(saved)))
    assert {name for name, device in found.items() if device == "cpu"} == on_cpu


def test_a_sparse_giant_is_small_on_disk_and_marked(tmp_path: Path) -> None:
    path = sparse_zip64(tmp_path / "big.pt")
    assert path.stat().st_size > 5 << 30
    assert path.stat().st_blocks * 512 < 1 << 20
    *_, big, after = storage_records(path)
    assert big.file_size > 1 << 32
    assert after.header_offset > 1 << 32
    assert set(labels(path).values()) == {"cpu", "cuda:1"}
    assert pid_locations(path) == [("0", "cpu"), ("1", "cuda:1"), ("2", "cuda:1")]
    mapped = load(path, weights_only=True, mmap=True)
    assert isinstance(mapped, dict)
    assert bytes(mapped["big"][-16:].tolist()) == b"data/1~~~~~~~~~~"
    assert bytes(mapped["after"][:4].view(torch.uint8).tolist()) == b"data/2~~~~~~~~~~"


def test_a_sparse_giant_is_compared_without_loading_it(tmp_path: Path) -> None:
    one, other = (sparse_zip64(tmp_path / f"{tag}.pt", 1 / 16, tag) for tag in ("cuda:1", "xpu:0"))
    expected = {"cuda:1": "xpu:0"}
    assert_same_checkpoint(one, other, expected, in_memory=False)
    info = storage_records(other)[1]
    with other.open("r+b") as file:
        file.seek(info.header_offset + 256)
        file.write(b"!")
    with pytest.raises(AssertionError):
        assert_same_checkpoint(one, other, expected, in_memory=False)


def test_rezipped_is_deflated_and_still_loads(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt", MAKERS["adamw_weights_only"]())
    out = rezip(source, tmp_path / "b.pt", compress=lambda _: True)
    assert all(info.compress_type == zipfile.ZIP_DEFLATED for info in storage_records(out))
    assert_same_checkpoint(source, out, {})


@pytest.mark.parametrize("name", ["adamw_weights_only", "tied_weights", "cpu_string_first"])
def test_squeezed_is_shorter_and_the_same(name: str, tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt", MAKERS[name]())
    out = squeeze(source, tmp_path / "b.pt")
    assert pickle_size(out) < pickle_size(source)
    assert_same_tree(inert_tree(source), inert_tree(out))
    assert pid_locations(source) == pid_locations(out)
    assert loads_safely(out)


def pickle_size(path: Path) -> int:
    with zipfile.ZipFile(path) as archive:
        return next(i.file_size for i in archive.infolist() if i.filename.endswith("data.pkl"))


def test_cpp_memoises_strings_by_value(tmp_path: Path) -> None:
    saved = (torch.ones(1), torch.ones(2), "cpu", torch.device("cpu"))
    path = save_by_cpp(saved, tmp_path / "a.pt")
    assert literals(path)["cpu"] == 1
    assert loads_safely(path)
    assert cpp_unpickler_accepts(path)


def test_a_hugging_face_trainer_folder(tmp_path: Path) -> None:
    folder = hf_trainer_folder(tmp_path, "cuda:0")
    found = {file: {where for _, where in pid_locations(folder / file)} for file in HF_FILES}
    assert found == HF_FILES
    assert (folder / "model.safetensors").is_file()


HF_FILES: dict[str, set[str]] = {
    "optimizer.pt": {"cuda:0", "cpu"},
    "rng_state.pth": {"cpu"},
    "scheduler.pt": set(),
    "training_args.bin": set(),
}


def test_a_lightning_checkpoint(tmp_path: Path) -> None:
    path = lightning_checkpoint(tmp_path / "last.ckpt", "cuda:0")
    assert {where for _, where in pid_locations(path)} == {"cuda:0", "cpu"}
    saved = load(path, weights_only=False)
    assert isinstance(saved, dict)
    assert saved["hyper_parameters"]["device_name"] == "cuda:0"


# Strategies and fixtures


@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=checkpoint_trees())
def test_random_trees_save_under_their_tags_and_load_again(
    made: Checkpoint, tmp_path: Path
) -> None:
    path = tmp_path / "made.pt"
    tags = save_tagged(made.tree, path, made.tag)
    assert dict(pid_locations(path)) == tags
    assert_same_loads(path, path, weights_only=True)


def test_the_corpus_helpers_agree(corpus: Path) -> None:
    assert corpus == corpus_folder()
    assert len(corpus_files("zip")) > 1


def test_an_absent_corpus_skips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CKPTMOVE_CORPUS", str(tmp_path))
    (absent,) = corpus_files("zip")
    assert [mark.name for mark in absent.marks] == ["skip"]


def test_the_corpus_zips_are_zips(corpus_zip: Path) -> None:
    assert zipfile.is_zipfile(corpus_zip)


def test_run_cli_checks_the_exit_code(run_cli: RunCli) -> None:
    with pytest.raises(AssertionError, match="exit code"):
        run_cli("--no-such-option", exit=0)
