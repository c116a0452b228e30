"""Folders of DeepSpeed with ZeRO: whole weights and optimizer state, without DeepSpeed."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import ckptmove
from ckptmove.errors import (
    CheckFailed,
    CkptmoveError,
    CorruptError,
    InputError,
    RefusedError,
    UnsupportedError,
)
from tests.conftest import RunCli, examples
from tests.making.building import at_most
from tests.making.saving import tagging
from tests.making.zero import Run, run, save_zero
from tests.oracles.sameness import assert_same_tree

KINDS = [(1, 2), (2, 1), (2, 3), (3, 1), (3, 2), (3, 5)]


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    """All that a model has by name: trained weights in float32, and what was not trained."""
    found = run.buffers | run.weights | run.frozen
    return found | {name: found[owner] for name, owner in run.shared.items()}


def assert_is(state: Any, run: Run) -> None:
    """Fail unless this is what was trained, to the bit."""
    wanted = weights_of(run)
    assert set(state["module"]) == set(wanted)
    for name, weight in wanted.items():
        assert_same_tree(state["module"][name].clone(), weight.clone())
    optimizer = state["optimizer"]
    names = [name for group in run.groups for name in group]
    assert [n for group in optimizer["param_groups"] for n in group["param_names"]] == names
    assert [n for group in optimizer["param_groups"] for n in group["params"]] == [
        *range(len(names))
    ]
    for n, name in enumerate(names):
        group = next(g for g, held in enumerate(run.groups) if name in held)
        assert_same_tree(
            {key: value.clone() for key, value in optimizer["state"][n].items()},
            {
                "step": torch.tensor(2.0 + group),
                "exp_avg": run.state("exp_avg", name),
                "exp_avg_sq": run.state("exp_avg_sq", name),
            },
        )
    assert state["epoch"] == 3
    assert state["zero"]["loss_scaler"]["cur_scale"] == 1.0


@pytest.mark.sample(2)
@pytest.mark.parametrize(("stage", "ranks"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_was_trained(stage: int, ranks: int, dtype: torch.dtype, tmp_path: Path) -> None:
    trained = run(stage=stage, ranks=ranks, dtype=dtype, subgroups=2 if stage == 3 else 1)
    folder = save_zero(tmp_path / "run", trained)
    assert_is(ckptmove.load(folder), trained)
    assert_is(ckptmove.load(tmp_path / "run"), trained)  # by its `latest`
    for name in ("out.pt", "out.safetensors"):
        report = ckptmove.convert(tmp_path / "run", tmp_path / name)
        assert report.source_format == "deepspeed"
        assert_is(ckptmove.load(tmp_path / name), trained)
        assert ckptmove.diff(folder, tmp_path / name).equal
    assert_is(torch.load(tmp_path / "out.pt", weights_only=True), trained)
    tensors = load_file(tmp_path / "out.safetensors")
    assert tensors["module.embed.weight"].equal(trained.weights["embed.weight"])
    assert ckptmove.validate(folder).ok


def test_an_optimizer_takes_its_state_and_goes_on(tmp_path: Path) -> None:
    trained = run(stage=2, ranks=3)
    ckptmove.convert(save_zero(tmp_path / "run", trained), tmp_path / "out.pt")
    saved = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]
    groups = [list(map(torch.nn.Parameter, group.values())) for group in trained.groups]
    optimizer = torch.optim.Adam([{"params": group} for group in groups])
    optimizer.load_state_dict(saved)
    for group, held in zip(groups, trained.groups, strict=True):
        for parameter, name in zip(group, held, strict=True):
            assert optimizer.state[parameter]["exp_avg"].equal(trained.state("exp_avg", name))
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    steps = [optimizer.state[p]["step"].item() for group in groups for p in group]
    assert steps == [3.0, 3.0, 4.0, 4.0, 4.0]  # each parameter has a step of its own


def test_weights_of_the_optimizer_or_of_the_model(tmp_path: Path, run_cli: RunCli) -> None:
    trained = run(stage=2, dtype=torch.bfloat16)
    folder = save_zero(tmp_path / "run", trained)
    said = run_cli("inspect", folder, exit=0).stderr
    assert "--weights module gives their copies in bfloat16" in said
    choices: dict[Literal["master", "module"], torch.dtype] = {
        "master": torch.float32,
        "module": torch.bfloat16,
    }
    for choice, dtype in choices.items():
        to = tmp_path / f"{choice}.safetensors"
        run_cli("convert", folder, to, "--weights", choice, exit=0)
        found = load_file(to)
        for name, weight in trained.weights.items():
            assert found[name].equal(weight.to(dtype))
        assert found["norm.weight"].equal(trained.frozen["norm.weight"])
        assert ckptmove.load(folder, weights=choice)["up.bias"].dtype == dtype
    ckptmove.convert(folder, tmp_path / "hf", preset="hf")
    assert load_file(tmp_path / "hf" / "model.safetensors")["up.bias"].dtype == torch.float32
    sliced = save_zero(tmp_path / "sliced", run(stage=3))
    with pytest.raises(UnsupportedError, match="has only the weights of the optimizer"):
        ckptmove.load(sliced, weights="module")
    torch.save({"w": torch.ones(2)}, tmp_path / "plain.pt")
    with pytest.raises(RefusedError, match="no master weights"):
        ckptmove.load(tmp_path / "plain.pt", weights="master")


@hypothesis_settings(max_examples=examples(40))
@given(
    shapes=st.lists(
        st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    ranks=st.integers(1, 5),
    stage=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_any_shapes_on_any_ranks(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[list[list[int]]],
    ranks: int,
    stage: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    groups = [
        {f"w{g}.{n}": torch.randn(s) for n, s in enumerate(each)} for g, each in enumerate(shapes)
    ]
    paddings = [[(seed + n) % 3 for n in range(len(each))] for each in shapes]
    trained = Run(stage, ranks, groups=groups, paddings=paddings, client={"epoch": 3})
    folder = save_zero(tmp_path_factory.mktemp("zero"), trained)
    assert_is(ckptmove.load(folder), trained)
    ckptmove.convert(folder, folder.parent / "out.safetensors")
    assert_is(ckptmove.load(folder.parent / "out.safetensors"), trained)


# -- a run with several checkpoints, trees ---------------------------------------------------------


def test_the_newest_of_a_run_is_read(tmp_path: Path, run_cli: RunCli) -> None:
    old, new = run(0, tag="global_step2"), run(1, tag="global_step10")
    for each in (old, new):
        save_zero(tmp_path / "run", each)
    assert_is(ckptmove.load(tmp_path / "run"), new)
    assert "not global_step2" in run_cli("inspect", tmp_path / "run", exit=0).stderr
    (tmp_path / "run" / "latest").write_text("../elsewhere")
    with pytest.raises(InputError, match=r"names '\.\./elsewhere'"):
        ckptmove.inspect(tmp_path / "run")
    (tmp_path / "run" / "latest").unlink()
    with pytest.raises(UnsupportedError, match="2 checkpoints and no file 'latest'"):
        ckptmove.inspect(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "global_step2")
    assert_is(ckptmove.load(tmp_path / "run"), new)


def test_a_batch_takes_each_as_one(tmp_path: Path, run_cli: RunCli) -> None:
    for tag in ("global_step2", "global_step4"):
        folder = save_zero(tmp_path / "tree" / "run", run(tag=tag))
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    done = run_cli("batch", "convert", tmp_path / "tree", tmp_path / "out", exit=1)
    assert "run/global_step4" in done.stdout
    assert "rank 1" in done.stdout
    found = {each.name: each.parent.name for each in (tmp_path / "out").rglob("*.safetensors")}
    assert found == {"model.safetensors": "global_step2"}
    with pytest.raises(UnsupportedError, match="one checkpoint, not a tree"):
        list(ckptmove.batch("convert", folder, tmp_path / "none"))


def test_in_the_folder_of_a_trainer_it_is_a_part(tmp_path: Path, run_cli: RunCli) -> None:
    trained = run(stage=2, tag="global_step5")
    folder = tmp_path / "checkpoint-5"
    save_zero(folder, trained)
    torch.save(torch.get_rng_state(), folder / "rng_state_0.pth")
    torch.save({"last_epoch": 5}, folder / "scheduler.pt")
    assert_is(ckptmove.load(folder)["global_step5"], trained)
    told = ckptmove.inspect(folder)
    assert {each.name for each in told.files if each.format == "deepspeed"} == {"global_step5"}
    whole = ckptmove.convert(folder, tmp_path / "all.safetensors")
    assert set(whole.left_out) == {"latest", "zero_to_fp32.py"}
    assert_is(ckptmove.load(tmp_path / "all.safetensors")["global_step5"], trained)
    run_cli("convert", folder, f"{tmp_path / 'parts'}/", exit=0)
    assert_is(ckptmove.load(tmp_path / "parts" / "global_step5.safetensors"), trained)
    assert not (tmp_path / "parts" / "global_step5").exists()


def test_relocate_takes_the_files_of_all_ranks(tmp_path: Path) -> None:
    folder = save_zero(tmp_path / "run", run(ranks=3))
    ckptmove.relocate(folder, tmp_path / "moved", to="cuda:0")
    for file in (tmp_path / "moved").iterdir():
        assert "cuda:0" in {each.device for each in ckptmove.inspect(file).tensors}
    assert_is(ckptmove.load(tmp_path / "moved", map_location="cpu"), run(ranks=3))
    (folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(InputError, match=r"optim states of 1 of its 3 ranks.*rank 2"):
        ckptmove.relocate(folder, tmp_path / "other", to="cuda:0")
    assert not (tmp_path / "other").exists()


# -- damage ----------------------------------------------------------------------------------------


def test_every_byte_of_a_partition_is_proved(tmp_path: Path) -> None:
    trained = run(stage=2, ranks=2)
    folder = save_zero(tmp_path / "run", trained)
    for tensor in (trained.weights["up.weight"], trained.state("exp_avg_sq", "up.bias")):
        held = tensor.numpy().tobytes()[:8]
        for file in folder.glob("zero_pp*"):
            content = file.read_bytes()
            if held not in content:
                continue
            file.write_bytes(content.replace(held, b"\1" + held[1:]))
            for dtype in (None, "float16"):  # copied, and gathered
                with pytest.raises(CorruptError, match="zero_pp_rank"):
                    ckptmove.convert(folder, tmp_path / "out.safetensors", dtype=dtype)
            assert not ckptmove.validate(folder).ok
            file.write_bytes(content)
    assert not (tmp_path / "out.safetensors").exists()


def saved_again(path: Path, change: Any) -> None:
    """Load a file of a rank, change what is in it, and save it."""
    from tests.making.zero import classes_of_deepspeed

    with classes_of_deepspeed():
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)


def check_refusal(folder: Path, file: str, change: Any, message: str) -> None:
    """Change a file of a folder, and check that the folder is then refused with this message."""
    saved_again(folder / file, change)
    out = folder.with_name("out.pt")
    with pytest.raises(InputError, match=message) as raised:
        ckptmove.convert(folder, out)
    assert len(str(raised.value)) <= 300
    assert not out.exists()


def inner(key: str, value: Any) -> Any:
    """A change of what the optimizer saved."""

    def change(state: Any) -> None:
        state["optimizer_state_dict"][key] = value

    return change


def shorter(state: Any) -> None:
    flats = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    flats[0] = flats[0][:-1].clone()


def other_step(state: Any) -> None:
    state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] += 1


def strange_state(state: Any) -> None:
    state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["factor"] = torch.ones(99)


def flats_elsewhere(state: Any) -> None:
    state["optimizer_state_dict"]["new"] = torch.ones(3)


def many_kinds(state: Any) -> None:
    first = state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    first.update({f"kind {n}": n for n in range(100)})


def one_group_twice(state: Any) -> None:
    groups = state["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
    groups[1] = groups[0]


OPTIM = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
CHANGES: dict[str, tuple[str, Any, str]] = {
    "fewer elements": (OPTIM, shorter, "have .* elements|not divided"),
    "another step": (OPTIM, other_step, "ranks differ in 'step'"),
    "unknown state": (OPTIM, strange_state, "differ in the optimizer state"),
    "other world": (OPTIM, inner("partition_count", [3, 3]), "number of ranks"),
    "worlds differ": (OPTIM, inner("partition_count", [2, 1]), "different numbers of ranks"),
    "negative": (OPTIM, inner("partition_count", [-1, -1]), "partition_count"),
    "elastic": (OPTIM, inner("base_optimizer_state", []), "elastic"),
    "not flat": (OPTIM, inner("single_partition_of_fp32_groups", [1, 2]), "single_partition"),
    "no groups": (OPTIM, inner("single_partition_of_fp32_groups", []), "number"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_partitions_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    check_refusal(save_zero(tmp_path / "run", run(stage=2)), *CHANGES[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (many_kinds, "103 kinds of state"),
        (one_group_twice, "two of its param_groups are one"),
        (inner(7, 1), "a name in it is not"),  # type: ignore[arg-type]
    ],
)
def test_what_would_grow_with_each_parameter_or_be_renamed_is_refused(
    change: Any, message: str, tmp_path: Path
) -> None:
    folder = save_zero(tmp_path / "run", run(stage=2))
    for file in folder.glob("zero_pp*"):
        saved_again(file, change)
    with pytest.raises(InputError, match=message):
        ckptmove.inspect(folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_shared_weight_that_is_not_there_is_refused_or_named(stage: int, tmp_path: Path) -> None:
    folder = save_zero(tmp_path / "run", run(stage=stage))
    for model in folder.glob("*model_states.pt"):
        saved_again(model, lambda state: state["shared_params"].update({"head.weight": "no.such"}))
    with pytest.raises(
        CorruptError, match=r"'head\.weight' shares the weight of 'no\.such', which"
    ):
        ckptmove.inspect(folder)

    def left_out(state: Any) -> None:
        """As with `exclude_frozen_parameters`."""
        state |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
        del state["module"]["norm.weight"], state["module"]["head.weight"]

    for model in folder.glob("*model_states.pt"):
        saved_again(model, left_out)
    [note] = ckptmove.inspect(folder).warnings
    assert note == "weights that were not trained were not saved: head.weight"


def test_names_of_weights_are_text(tmp_path: Path) -> None:
    folder = save_zero(tmp_path / "run", run(stage=2))
    model = folder / "mp_rank_00_model_states.pt"
    saved_again(model, lambda state: state["module"].update({("a", 1): torch.ones(2)}))
    with pytest.raises(InputError, match="a name in its module"):
        ckptmove.inspect(folder)


@pytest.mark.slow
def test_many_of_all_are_read_in_time_that_grows_with_them_alone(tmp_path: Path) -> None:
    """Shared lists are walked once, and what is looked up is found by its number or name."""
    folder = save_zero(tmp_path / "run", run(stage=3, ranks=1))
    many, numbers = 20_000, list(range(100_000, 200_000))

    def groups(state: Any) -> None:
        state["optimizer_state_dict"] |= {
            "fp32_flat_groups": [torch.zeros(0)],
            "optimizer_state_dict": {
                "state": {},
                "param_groups": [{"params": numbers} for _ in range(many)],
            },
        }

    def shapes(state: Any) -> None:
        state |= {"param_shapes": [{} for _ in range(many)], "module": {}, "shared_params": {}}
        state |= {"frozen_param_shapes": {}, "frozen_param_fragments": {}}

    saved_again(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", groups)
    saved_again(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt", shapes)
    with at_most(20):
        assert ckptmove.inspect(folder).tensors == ()


def test_what_all_ranks_have_of_unknown_use_is_refused(tmp_path: Path) -> None:
    folder = save_zero(tmp_path / "run", run(stage=2))
    for file in folder.glob("zero_pp*"):
        saved_again(file, strange_state)
    with pytest.raises(UnsupportedError, match="'factor' is not divided"):
        ckptmove.inspect(folder)
    folder = save_zero(tmp_path / "other", run(stage=2))
    saved_again(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", flats_elsewhere)
    with pytest.raises(UnsupportedError, match="has tensors under 'new'"):
        ckptmove.inspect(folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_missing_files_are_named(stage: int, tmp_path: Path) -> None:
    kept = save_zero(tmp_path / "run", run(stage=stage, ranks=4))
    for missing in ([1], [3], [0, 3], [0, 1, 3]):
        folder = tmp_path / f"{missing}"
        shutil.copytree(kept, folder)
        for number in missing:
            (folder / f"zero_pp_rank_{number}_mp_rank_00_optim_states.pt").unlink()
        ranks = ", ".join(map(str, missing))
        message = f"optim states of {len(missing)} of its 4 ranks.*: rank {ranks};"
        with pytest.raises(InputError, match=message):
            ckptmove.inspect(folder)
    (name,) = sorted(each.name for each in kept.glob("*model_states.pt"))[:1]
    (kept / name).unlink()
    with pytest.raises(InputError, match=r"model_states.pt' is missing|model states of 1 of its 4"):
        ckptmove.inspect(kept)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["optim", "model"])
def test_a_file_by_the_name_of_another_rank_is_refused(
    stage: int, kind: str, tmp_path: Path
) -> None:
    folder = save_zero(tmp_path, run(stage=stage))
    files = sorted(folder.glob(f"zero_pp_rank_*_{kind}_states.pt"))
    if len(files) < 2:
        return  # the model of stage 2 is in one file
    shutil.copy(files[0], files[1])
    message = f"was saved as {files[0].name}, which is the name of another file"
    with pytest.raises(CorruptError, match=message):
        ckptmove.convert(folder, tmp_path / "out.pt")


def test_files_of_two_saves_are_refused(tmp_path: Path) -> None:
    folder = save_zero(tmp_path / "run", run(stage=2, ranks=4))
    save_zero(tmp_path / "run", run(stage=2, ranks=2))  # fewer ranks leave the files of the others
    with pytest.raises(CorruptError, match="of rank 2, but was saved by 2 ranks"):
        ckptmove.inspect(folder)
    for rank in (2, 3):
        (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
    assert ckptmove.inspect(folder).tensors
    shutil.copy(folder / OPTIM, folder / f"bf16_{OPTIM}")
    with pytest.raises(CorruptError, match="of two saves"):
        ckptmove.inspect(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor parallelism"),
        ("layer_03-model_01-model_states.pt", "tensor parallelism"),
        ("layer_0_expert_2_mp_rank_00_model_states.pt", "experts"),
    ],
)
def test_what_has_no_rule_is_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    folder = save_zero(tmp_path / "run", run(stage=2))
    shutil.copy(folder / OPTIM, folder / name)
    with pytest.raises(UnsupportedError, match=message):
        ckptmove.inspect(folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_truncated_and_overwritten_files_give_one_line(stage: int, tmp_path: Path) -> None:
    folder = save_zero(tmp_path / "run", run(stage=stage))
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        cuts = [content[:n] for n in (0, 1, 100, len(content) // 2, len(content) - 1)]
        for damaged in (*cuts, b"\0" * len(content)):
            file.write_bytes(damaged)
            with pytest.raises(CkptmoveError) as raised:
                ckptmove.convert(folder, tmp_path / "out.pt")
            assert "\n" not in str(raised.value)
            assert len(str(raised.value)) <= 300 + len(str(tmp_path))
        file.write_bytes(content)
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("stage", [2, 3])
def test_compressed_files_are_salvaged_or_read_after_convert(stage: int, tmp_path: Path) -> None:
    """As a zip tool that packs them again leaves them; they are not read in place."""
    trained = run(stage=stage, ranks=2)
    folder = save_zero(tmp_path / "in", trained)
    files = sorted(folder.rglob("*_states.pt"))
    for path in files:
        with zipfile.ZipFile(path) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in records.items():
                archive.writestr(name, content)
    with pytest.raises(UnsupportedError, match="has compressed tensors") as caught:
        ckptmove.load(folder)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("ckptmove convert FILE ELSEWHERE/FILE")
    found = ckptmove.salvage(folder, tmp_path / "out.pt")
    assert found.tensors
    assert found.complete
    (tmp_path / "elsewhere").mkdir()
    for path in files:
        ckptmove.convert(path, tmp_path / "elsewhere" / path.name)
        shutil.copy(tmp_path / "elsewhere" / path.name, path)
    assert_is(ckptmove.load(folder), trained)


def test_shapes_that_lie_are_refused(tmp_path: Path) -> None:
    folder = save_zero(tmp_path / "run", run(stage=2))
    model = folder / "mp_rank_00_model_states.pt"

    def larger(state: Any) -> None:
        state["param_shapes"][0]["embed.weight"] = torch.Size([1 << 40, 1 << 18])

    def fewer(state: Any) -> None:
        del state["param_shapes"][1]["down.weight"]

    for change in (larger, fewer):
        save_zero(tmp_path / "run", run(stage=2))
        saved_again(model, change)
        with pytest.raises(CorruptError, match=r"elements, and its parameters|alignment_paddings"):
            ckptmove.convert(folder, tmp_path / "out.pt")


def test_what_the_files_say_of_devices_is_told(tmp_path: Path) -> None:
    with tagging("cuda:3"):
        folder = save_zero(tmp_path, run())
    found = ckptmove.inspect(folder)
    [note] = found.warnings
    assert found.verdict.endswith("merged of files tagged cuda:3")
    found.require("cuda:3")
    with pytest.raises(CheckFailed, match="is on cuda:3"):
        found.require("cuda:0")
    assert (
        note
        == "its files are tagged cuda:3; the tensors assembled from them are shown without devices"
    )


def test_what_lies_beside_the_files_of_ranks_is_told(tmp_path: Path) -> None:
    folder = save_zero(tmp_path, run())
    assert ckptmove.inspect(folder).warnings == ckptmove.inspect(tmp_path).warnings == ()
    (folder / "sampler.json").write_text("{}")
    (tmp_path / "config.yaml").write_text("a: 1\n")
    assert set(ckptmove.inspect(tmp_path).warnings) == {
        "config.yaml in it was not looked at",
        "sampler.json in it was not looked at",
    }


def test_a_checkpoint_beside_the_files_of_ranks_is_no_silence(tmp_path: Path) -> None:
    folder = save_zero(tmp_path, run())
    assert ckptmove.validate(tmp_path).ok
    torch.save({"w": torch.ones(2)}, folder / "other.pt")
    (folder / "best").mkdir()
    torch.save({"w": torch.ones(2)}, folder / "best" / "model.pth")
    left = {f"{folder.name}/other.pt", f"{folder.name}/best/model.pth"}
    found = ckptmove.inspect(tmp_path)
    assert {each.name for each in found.files if each.not_read} == left
    with pytest.raises(CheckFailed, match=r"not read: .*best/model\.pth"):
        ckptmove.inspect(tmp_path, require="cpu")
    done = ckptmove.validate(tmp_path)
    assert not done.ok
    said = str(done.to_json())
    assert all(f"{name} was not checked" in said for name in left)
