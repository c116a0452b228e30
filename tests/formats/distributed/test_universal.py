"""Universal checkpoints of DeepSpeed, and pipelines: whole weights and optimizer state."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptmove
from ckptmove.errors import CkptmoveError, CorruptError, InputError, UnsupportedError
from tests.conftest import RunCli
from tests.making.zero import Run, run, save_pipeline, save_universal, save_zero
from tests.oracles.sameness import assert_same_tree

from .test_deepspeed import assert_is, check_refusal, saved_again


@pytest.mark.sample(1)
@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 1), (3, 1), (3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_was_trained(stage: int, ranks: int, dtype: torch.dtype, tmp_path: Path) -> None:
    trained = run(stage=stage, ranks=ranks, dtype=dtype)
    if stage == 3:  # one step of all is stored
        trained = replace(trained, groups=[trained.groups[0] | trained.groups[1]])
    folder = save_universal(tmp_path / "run", trained)
    assert_is(ckptmove.load(folder), trained)
    assert_is(ckptmove.load(tmp_path / "run"), trained)  # by its `latest_universal`
    for name in ("out.pt", "out.safetensors"):
        assert ckptmove.convert(folder, tmp_path / name).source_format == "universal"
        assert_is(ckptmove.load(tmp_path / name), trained)
        assert ckptmove.diff(folder, tmp_path / name).equal
    assert ckptmove.diff(folder, save_zero(tmp_path / "ranks", trained)).equal
    assert ckptmove.validate(folder).ok


def test_weights_of_the_optimizer_or_of_the_model(tmp_path: Path, run_cli: RunCli) -> None:
    trained = run(stage=2, dtype=torch.bfloat16)
    folder = save_universal(tmp_path, trained)
    for choice, dtype in {"master": torch.float32, "module": torch.bfloat16}.items():
        to = tmp_path / f"{choice}.safetensors"
        run_cli("convert", folder, to, "--weights", choice, exit=0)
        assert load_file(to)["up.bias"].equal(trained.weights["up.bias"].to(dtype))
    ckptmove.convert(folder, tmp_path / "hf", preset="hf")
    assert load_file(tmp_path / "hf" / "model.safetensors")["up.bias"].dtype == torch.float32


def test_a_tree_has_it_as_one_item(tmp_path: Path, run_cli: RunCli) -> None:
    trained = run(stage=2)
    save_zero(tmp_path / "runs", trained)
    save_universal(tmp_path / "runs", trained)
    run_cli("batch", "convert", tmp_path / "runs", tmp_path / "out", exit=0)
    for name in ("global_step2", "global_step2_universal"):
        assert_is(ckptmove.load(tmp_path / "out" / name / "model.safetensors"), trained)
    moved = run_cli("relocate", tmp_path / "runs", tmp_path / "moved", "--to", "cuda:1", exit=0)
    assert "verified" in moved.stdout
    saved = torch.load(tmp_path / "moved/global_step2_universal" / FP32, "meta")
    assert saved["param"].shape == (5,)
    assert_is(ckptmove.load(tmp_path / "moved/global_step2_universal", map_location="cpu"), trained)


FP32 = "zero/up.bias/fp32.pt"
DAMAGE: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "another shape": (FP32, lambda s: s.update(param=torch.zeros(6)), "6 elements, and its param"),
    "another order": (
        "zero/up.weight/exp_avg.pt",
        lambda s: s.update(param=torch.zeros(3, 5)),
        "of two saves",
    ),
    "no tensor": (FP32, lambda s: s.update(param=3), "it is not what DeepSpeed saves"),
    "no param": (FP32, lambda s: s.clear(), "it is not what DeepSpeed saves"),
    "groups": (
        "zero/optimizer_state.pt",
        lambda s: s["param_groups"].pop(),
        "the number of its param_groups",
    ),
    "a renamed weight": (
        "mp_rank_00_model_states.pt",
        lambda s: s["param_shapes"][1].update({"x": s["param_shapes"][1].pop("up.bias")}),
        "'zero/x/fp32.pt' is missing",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    check_refusal(save_universal(tmp_path / "run", run(stage=2)), *DAMAGE[name])


@pytest.mark.parametrize(
    "name", [FP32, "zero/optimizer_state.pt", "mp_rank_00_model_states.pt", "zero/scale"]
)
def test_missing_files_are_named(name: str, tmp_path: Path) -> None:
    folder = save_universal(tmp_path / "run", run(stage=2))
    gone = folder / name
    if gone.is_dir():  # of a buffer, which the model's file has
        shutil.rmtree(gone)
        assert_is(ckptmove.load(folder), run(stage=2))
        return
    gone.unlink()
    with pytest.raises(InputError, match=name):
        ckptmove.convert(folder, tmp_path / "out.pt")


def test_state_that_is_gone_and_files_of_others_are_told(tmp_path: Path) -> None:
    folder = save_universal(tmp_path / "run", run(stage=2))
    shutil.copytree(folder / "zero/up.bias", folder / "zero/other.bias")
    with pytest.raises(CorruptError, match=r"has files of other\.bias, which the model does not"):
        ckptmove.inspect(folder)
    shutil.rmtree(folder / "zero/other.bias")
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "layer_0_expert_0_x_states.pt")
    with pytest.raises(UnsupportedError, match="experts of a mixture"):
        ckptmove.inspect(folder)


def test_truncated_and_overwritten_files_give_one_line(tmp_path: Path) -> None:
    folder = save_universal(tmp_path / "run", run(stage=2))
    for file in (folder / FP32, folder / "zero/optimizer_state.pt"):
        content = file.read_bytes()
        for damaged in (b"", content[:100], content[:-1], b"\0" * len(content)):
            file.write_bytes(damaged)
            with pytest.raises(CkptmoveError) as raised:
                ckptmove.convert(folder, tmp_path / "out.pt")
            assert "\n" not in str(raised.value)
        file.write_bytes(content)
    assert not (tmp_path / "out.pt").exists()


# -- pipelines -------------------------------------------------------------------------------------


def pipeline() -> list[Run]:
    """Two stages, of two and three ranks, with two groups each."""
    torch.manual_seed(0)
    first = [
        {"0.weight": torch.randn(5, 3), "2.weight": torch.randn(4, 5)},
        {"0.bias": torch.randn(5)},
    ]
    last = [
        {"3.weight": torch.randn(2, 4)},
        {"3.norm.bias": torch.randn(2), "10.bias": torch.randn(7)},
    ]
    buffers = {"2.scale": torch.tensor(7.5)}
    common: dict[str, Any] = {"stage": 1, "dtype": torch.bfloat16}
    return [
        Run(groups=first, ranks=2, buffers=buffers, client={"epoch": 3}, **common),
        Run(groups=last, ranks=3, client={"epoch": 3}, **common),
    ]


def test_stages_of_a_pipeline_are_joined(tmp_path: Path) -> None:
    stages = pipeline()
    folder = save_pipeline(tmp_path / "run", stages)
    whole = Run(
        groups=[a | b for a, b in zip(*(stage.groups for stage in stages), strict=True)],
        buffers=stages[0].buffers,
    )
    assert_is(ckptmove.load(tmp_path / "run"), whole)
    ckptmove.convert(folder, tmp_path / "out.safetensors")
    assert ckptmove.diff(folder, tmp_path / "out.safetensors").equal
    ckptmove.convert(folder, tmp_path / "own.safetensors", weights="module")
    found = load_file(tmp_path / "own.safetensors")
    assert_same_tree(found["10.bias"], whole.weights["10.bias"].bfloat16())
    assert ckptmove.validate(folder).ok
    names = list(ckptmove.load(folder)["module"])
    assert names == sorted(names, key=lambda name: int(name.split(".")[0]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layer_03-model_states.pt", r"layer_03-model_states\.pt' is missing"),
        ("mp_rank_01_model_states.pt", r"mp_rank_01_model_states\.pt' is missing"),
        ("zero_pp_rank_1_mp_rank_01_optim_states.pt", "optim states of 1 of its 3 ranks"),
        ("*_mp_rank_01_*", "no states of the optimizer for mp_rank_01"),
        ("*mp_rank_01_*", "the files of 1 stages of a pipeline, of 2"),
        ("zero_pp_*", "without ZeRO 1 or 2"),
    ],
)
def test_missing_files_of_stages_are_named(name: str, message: str, tmp_path: Path) -> None:
    folder = save_pipeline(tmp_path / "run", pipeline())
    for gone in folder.glob(name):
        gone.unlink()
    with pytest.raises(InputError, match=message):
        ckptmove.convert(folder, tmp_path / "out.pt")


def test_layers_that_share_a_weight_are_refused_by_name(tmp_path: Path) -> None:
    stages = pipeline()
    stages[1] = replace(stages[1], groups=[{"0.weight": torch.randn(5, 3)}, stages[1].groups[1]])
    with pytest.raises(UnsupportedError, match=r"layers share a weight \('0\.weight'\)"):
        ckptmove.inspect(save_pipeline(tmp_path / "twice", stages))
    folder = save_pipeline(tmp_path / "tied", pipeline())
    tied = "tied_modules.embed.weight"
    model = folder / "mp_rank_00_model_states.pt"
    for name, message in ((tied, "layers share a weight"), ("up.weight", "of no layer")):
        saved_again(
            model,
            lambda s, name=name: s["param_shapes"][1].update(
                {name: s["param_shapes"][1].popitem()[1]}
            ),
        )
        with pytest.raises(UnsupportedError, match=message):
            ckptmove.inspect(folder)


@pytest.mark.parametrize("by_ckptmove", [False, True])
def test_files_that_took_each_others_names_are_refused(by_ckptmove: bool, tmp_path: Path) -> None:
    """torch.save puts the name of a file into it; so does what we write."""
    folder = save_universal(tmp_path / "run", run())
    if by_ckptmove:
        ckptmove.convert(folder, tmp_path / "own", format="universal")
        (folder,) = (tmp_path / "own").glob("*_universal/")
        ckptmove.inspect(folder)
    one, other = (folder / f"zero/up.bias/exp_avg{end}.pt" for end in ("", "_sq"))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    message = r"was saved as exp_avg(_sq)?\.pt, which is the name of another file"
    for verb in (ckptmove.inspect, lambda path: ckptmove.convert(path, tmp_path / "out.pt")):
        with pytest.raises(CorruptError, match=message):
            verb(folder)
