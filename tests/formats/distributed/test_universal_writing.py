"""`--format universal`: what DeepSpeed goes on from, made of any training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptmove
from ckptmove.errors import RefusedError, UsageError
from tests.conftest import RunCli
from tests.making.frameworks import is_here
from tests.making.zero import run, save_universal, save_zero
from tests.oracles.deepspeed_engine import batches, model_and_optimizer
from tests.oracles.sameness import assert_same_tree

from .test_deepspeed import saved_again

KINDS = [(1, 2, torch.float32), (2, 3, torch.bfloat16), (3, 2, torch.bfloat16)]


def trained(steps: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after some steps."""
    net, optimizer = model_and_optimizer(seed=0)
    go_on(net, optimizer, steps)
    return net, optimizer


def go_on(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Train; gives the losses."""
    losses = list[float]()
    for batch in batches(steps, next(net.parameters()).dtype):
        optimizer.zero_grad()
        loss = net(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save_pt(path: Path, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    return path


def checkpoint_in(folder: Path) -> Path:
    """The one that the newest is."""
    return folder / (folder / "latest_universal").read_text()


@pytest.mark.parametrize(("stage", "ranks", "dtype"), KINDS)
def test_files_are_those_of_ds_to_universal(
    stage: int, ranks: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    made = run(stage=stage, ranks=ranks, dtype=dtype)
    told = save_universal(tmp_path / "told", run(stage=2, dtype=dtype))
    report = ckptmove.convert(
        save_zero(tmp_path / "zero", made), tmp_path / "out", format="universal"
    )
    assert list(report.files)[-1] == str(tmp_path / "out" / "latest_universal")
    found = checkpoint_in(tmp_path / "out")
    for name in made.weights:
        theirs = {each.name for each in (told / "zero" / name).iterdir()}
        assert {each.name for each in (found / "zero" / name).iterdir()} == theirs
        for file in theirs if stage < 3 else theirs - {"step.pt"}:  # of 3 it has one of all
            mine, other = (torch.load(each / "zero" / name / file) for each in (found, told))
            assert_same_tree(mine, other)
    with torch.serialization.safe_globals([torch.Size]):
        model = torch.load(found / "mp_rank_00_model_states.pt")
    assert_same_tree(model["module"]["scale"], made.buffers["scale"])
    assert [dict(each) for each in model["param_shapes"]] == [
        {name: each.shape for name, each in group.items()} for group in made.groups
    ]
    optimizer = torch.load(found / "zero" / "optimizer_state.pt")
    assert [group["params"] for group in optimizer["param_groups"]] == [[0, 1], [2, 3, 4]]
    assert optimizer["ds_version"] == "0.19.8"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("stage", "ranks", "dtype"), KINDS)
def test_it_is_read_back_as_it_was(
    stage: int, ranks: int, dtype: torch.dtype, tmp_path: Path, run_cli: RunCli
) -> None:
    source = save_zero(tmp_path / "zero", run(stage=stage, ranks=ranks, dtype=dtype))
    said = run_cli("convert", source, tmp_path / "out", "--format", "universal", exit=0).stderr
    assert "nothing, mask" in said
    assert "the loss scaler starts as" in said
    mine, theirs = ckptmove.load(tmp_path / "out"), ckptmove.load(source)
    for part in ("module", "optimizer"):
        assert_same_tree(mine[part], theirs[part])
    assert mine["epoch"] == 3
    assert ckptmove.validate(tmp_path / "out").ok
    again = tmp_path / "again"
    ckptmove.convert(source, again, format="universal")
    for file in (tmp_path / "out").rglob("*.pt"):
        assert file.read_bytes() == (again / file.relative_to(tmp_path / "out")).read_bytes()
    ckptmove.convert(tmp_path / "out", tmp_path / "twice", format="universal")
    assert_same_tree(ckptmove.load(tmp_path / "twice"), mine)


@pytest.mark.parametrize("kind", ["pt", "dcp", "trainer", "lightning", "bfloat16"])
def test_any_training_becomes_one(kind: str, tmp_path: Path) -> None:
    net, optimizer = trained()
    source = save_pt(tmp_path / "in.pt", net, optimizer)
    if kind == "dcp":
        ckptmove.convert(source, tmp_path / "dcp", format="dcp", ranks=2)
        source = tmp_path / "dcp"
    if kind == "trainer":
        source = tmp_path / "trainer"
        source.mkdir()
        save_file(net.state_dict(), source / "model.safetensors", {"format": "pt"})
        torch.save(optimizer.state_dict(), source / "optimizer.pt")
    if kind == "lightning":
        state = {"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()]}
        torch.save(state, source)
    if kind == "bfloat16":
        net.bfloat16()
        save_pt(source, net, optimizer)
    report = ckptmove.convert(source, tmp_path / "out", format="universal")
    found = ckptmove.load(tmp_path / "out")
    wanted = {name: each.float() for name, each in net.state_dict().items()}
    for name, weight in wanted.items():
        assert_same_tree(found["module"][name].clone(), weight)
    told = [each for each in report.warnings if "became float32 from bfloat16" in each]
    assert len(told) == (kind == "bfloat16")
    assert found["global_steps"] == 3
    assert checkpoint_in(tmp_path / "out").name == "global_step3_universal"
    state = optimizer.state_dict()["state"]
    for n in state:
        assert_same_tree(
            {k: v.clone() for k, v in found["optimizer"]["state"][n].items()}, state[n]
        )


def adam(**options: Any) -> Any:
    return lambda net: torch.optim.Adam(net.parameters(), **options)


REFUSED: dict[str, tuple[Any, str]] = {
    "no Adam": (lambda net: torch.optim.SGD(net.parameters(), momentum=0.9), "has no step of"),
    "more than Adam": (adam(amsgrad=True), "has max_exp_avg_sq of '0.weight'"),
    "no gradient": (lambda net: adam()(net.requires_grad_()), "has no step of '1.weight'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_optimizer_is_refused(name: str, tmp_path: Path) -> None:
    make, message = REFUSED[name]
    net, _ = model_and_optimizer(seed=0)
    optimizer = make(net)
    go_on(net if name != "no gradient" else net[0], optimizer, 1)  # type: ignore[index]
    save_pt(tmp_path / "in.pt", net, optimizer)
    refuses(tmp_path, message)


def refuses(folder: Path, message: str) -> None:
    """Fail unless `in.pt` is refused so, and nothing is written."""
    with pytest.raises(RefusedError, match=message) as raised:
        ckptmove.convert(folder / "in.pt", folder / "out", format="universal")
    assert len(str(raised.value)) <= 300
    assert not (folder / "out").exists()


def later(state: Any) -> None:
    state["optimizer"]["state"][1]["step"] += 1


def renamed(state: Any) -> None:
    state["model"] = {f"module.{name}": each for name, each in state["model"].items()}
    for group, names in zip(state["optimizer"]["param_groups"], NAMES, strict=True):
        group["param_names"] = names


def named_badly(name: str) -> Any:
    def change(state: Any) -> None:
        state["model"][name] = state["model"].pop("0.weight")
        for group, names in zip(state["optimizer"]["param_groups"], NAMES, strict=True):
            group["param_names"] = [name if each == "0.weight" else each for each in names]

    return change


NAMES = [["0.weight", "1.weight"], ["0.bias", "1.bias"]]
CHANGES: dict[str, tuple[Any, str]] = {
    "steps": (later, "one step for all parameters of a group"),
    "half a step": (lambda s: s["optimizer"]["state"][0]["step"].add_(0.5), "no count of steps"),
    "prefix": (renamed, "no state dict of a model has all parameters"),
    "parent": (named_badly(".."), "can't be the name of a folder"),
    "slash": (named_badly("../up"), "can't be the name of a folder: it has a slash"),
    "taken": (named_badly("optimizer_state.pt"), "can't be the name of a folder"),
    "no optimizer": (lambda s: s.pop("optimizer"), "has no optimizer beside a model"),
    "two": (lambda s: s.update(other=dict(s["optimizer"])), "has 2 optimizers"),
    "two models": (
        lambda s: s.update(teacher={k: v.clone() for k, v in s["model"].items()}),
        "can't be known: it has no model beside it, or several",
    ),
    "shape": (
        lambda s: s["optimizer"]["state"][0].update(exp_avg=torch.ones(2)),
        "exp_avg of '0.weight' has another shape|can't be known for sure",
    ),
    "double": (
        lambda s: s["model"].update({"0.weight": s["model"]["0.weight"].double()}),
        "is float64, and must be float32",
    ),
    "module": (lambda s: s.update(module={"a": 1}), "'module' has a name that DeepSpeed uses"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_it_has_no_form_for_is_refused(name: str, tmp_path: Path) -> None:
    change, message = CHANGES[name]
    saved_again(save_pt(tmp_path / "in.pt", *trained()), change)
    refuses(tmp_path, message)


def test_a_loss_scale_that_changes_is_a_loss(tmp_path: Path) -> None:
    state = {"model": trained()[0].state_dict(), "optimizer": trained()[1].state_dict()}
    scaler = {"class": "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler", "cur_scale": 8.0}
    torch.save(state | {"zero": {"loss_scaler": scaler, "overflow": False}}, tmp_path / "in.pt")
    refuses(tmp_path, r"would lose zero\.loss_scaler")
    ckptmove.convert(tmp_path / "in.pt", tmp_path / "out", format="universal", drop="zero.*")
    saved = torch.load(checkpoint_in(tmp_path / "out") / "zero" / "optimizer_state.pt")
    assert saved["overflow"] is False
    assert "loss_scaler" not in saved


def test_steps_that_are_numbers_stay_numbers(tmp_path: Path) -> None:
    saved_again(
        save_pt(tmp_path / "in.pt", *trained()),
        lambda s: [each.update(step=3) for each in s["optimizer"]["state"].values()],
    )
    ckptmove.convert(tmp_path / "in.pt", tmp_path / "out", format="universal")
    assert torch.load(checkpoint_in(tmp_path / "out") / "zero" / "1.bias" / "step.pt") == 3
    assert ckptmove.load(tmp_path / "out")["optimizer"]["state"][0]["step"] == 3


def test_it_has_no_ranks_and_is_a_folder(tmp_path: Path) -> None:
    save_pt(tmp_path / "in.pt", *trained())
    with pytest.raises(UsageError, match="universal is not divided by ranks"):
        ckptmove.convert(tmp_path / "in.pt", tmp_path / "out", format="universal", ranks=2)
    with pytest.raises(UsageError, match="universal is a folder"):
        ckptmove.convert(tmp_path / "in.pt", tmp_path / "out.pt", format="universal")


# -- DeepSpeed itself ------------------------------------------------------------------------------


def engine(stage: int, dtype: str, folder: Path, result: Path) -> Any:
    """What DeepSpeed gets: see `tests.oracles.deepspeed_engine`."""
    arguments = [str(stage), dtype, str(folder), str(result)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.oracles.deepspeed_engine", *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(result)


@pytest.mark.slow
@pytest.mark.skipif(not is_here("deepspeed"), reason="DeepSpeed is installed by scripts/libraries")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (3, 1), (2, 1)])
def test_deepspeed_goes_on(before: int, after: int, dtype: str, tmp_path: Path) -> None:
    wanted = engine(before, dtype, tmp_path / "run", tmp_path / "wanted.pt")
    ckptmove.convert(tmp_path / "run", tmp_path / "out", format="universal")
    found = engine(after, dtype, tmp_path / "out", tmp_path / "found.pt")
    assert found["losses"] == wanted["losses"]
    assert (found["epoch"], found["steps"]) == (3, 8)
    if before < 3:
        assert_same_tree(found["module"], wanted["module"])


@pytest.mark.slow
@pytest.mark.skipif(not is_here("deepspeed"), reason="DeepSpeed is installed by scripts/libraries")
@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_goes_on_from_what_torch_trained(stage: int, tmp_path: Path) -> None:
    net, optimizer = trained()
    ckptmove.convert(
        save_pt(tmp_path / "in.pt", net, optimizer), tmp_path / "out", format="universal"
    )
    found = engine(stage, "float32", tmp_path / "out", tmp_path / "found.pt")
    assert found["losses"] == go_on(net, optimizer, 5)
    assert_same_tree(found["module"], dict(net.state_dict()))
