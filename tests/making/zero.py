"""Folders of DeepSpeed with ZeRO, written as `engine.save_checkpoint` of 0.19 writes them.

Checked once against the library itself: `zero_to_fp32` of 0.19.8 makes of these folders the weights
that went in. Universal checkpoints and pipelines are as `ds_to_universal` and `PipelineModule` of
0.19.8 write them.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


@dataclass
class Run:
    """A model that was trained by ranks, and what is to be found in its checkpoint."""

    stage: int = 2
    ranks: int = 2
    dtype: torch.dtype = torch.float32  #: that the model trained with
    groups: Sequence[Tensors] = ()  #: trained weights, in float32
    frozen: Tensors = field(default_factory=dict)  #: in the dtype of the model
    shared: Mapping[str, str] = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    paddings: Sequence[Sequence[int]] = ()  #: elements after each weight of a group
    subgroups: int = 1  #: of each group, with stage 3
    client: Mapping[str, Any] = field(default_factory=dict)
    tag: str = "global_step2"

    @property
    def weights(self) -> Tensors:
        """All trained weights."""
        return {name: weight for group in self.groups for name, weight in group.items()}

    def state(self, key: str, name: str) -> torch.Tensor:
        """What the optimizer has of a weight: something else than the weight."""
        return self.weights[name] * (0.5 if key == "exp_avg" else 2) + 1


def run(seed: int = 0, **options: Any) -> Run:
    """A small model with two groups, a frozen weight, a tied one and buffers."""
    torch.manual_seed(seed)
    groups = [
        {"embed.weight": torch.randn(11, 3), "up.weight": torch.randn(5, 3)},
        {"up.bias": torch.randn(5), "scalar": torch.randn(()), "down.weight": torch.randn(3, 5)},
    ]
    dtype = options.get("dtype", torch.float32)
    return Run(
        groups=groups,
        frozen={"norm.weight": torch.randn(7).to(dtype)},
        shared={"head.weight": "embed.weight"},
        buffers={
            "scale": torch.tensor(7.5),
            "nothing": torch.empty(0, 3),
            "mask": torch.tensor([True, False, True]),
        },
        client={"epoch": 3, "note": "client"},
        **options,
    )


def save_zero(folder: Path, run: Run) -> Path:
    """Write a run, and give the folder of its checkpoint."""
    to = folder / run.tag
    to.mkdir(parents=True, exist_ok=True)
    (folder / "latest").write_text(run.tag)
    (folder / "zero_to_fp32.py").write_text("# the script of DeepSpeed")
    prefix = "bf16_" if run.dtype == torch.bfloat16 else ""
    with classes_of_deepspeed() as classes:
        for rank in range(run.ranks):
            name = "mp_rank_00_model_states.pt"
            if run.stage == 3:
                torch.save(_model(run, rank), to / f"zero_pp_rank_{rank}_{name}")
            elif rank == 0:
                torch.save(_model(run, rank), to / name)
            optimizer = _partitions(run, rank) if run.stage < 3 else _slices(run, rank)
            optimizer["loss_scaler"] = classes["LossScaler"](1.0)
            optimizer["zero_stage"] = classes["ZeroStageEnum"](run.stage)
            saved = {"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0.19.8"}
            torch.save(saved, to / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return to


def save_universal(folder: Path, run: Run) -> Path:
    """Write a run as `ds_to_universal` does, and give the folder of its checkpoint."""
    to = folder / f"{run.tag}_universal"
    (to / "zero").mkdir(parents=True, exist_ok=True)
    (folder / "latest_universal").write_text(to.name)
    sliced = run.stage == 3
    with classes_of_deepspeed() as classes:
        for rank in range(run.ranks if sliced else 1):
            name = f"zero_pp_rank_{rank}_mp_rank_00" if sliced else "mp_rank_00"
            torch.save(_model(run, rank), to / f"{name}_model_states.pt")
        states = _slices(run, 0) if sliced else _partitions(run, 0)
        if not sliced:
            states["param_groups"] = states.pop("base_optimizer_state")["param_groups"]
            del states["single_partition_of_fp32_groups"]
        else:
            states["param_groups"] = states["optimizer_state_dict"]["param_groups"]
        states["loss_scaler"] = classes["LossScaler"](1.0)
        states["zero_stage"] = classes["ZeroStageEnum"](run.stage)
        torch.save(states, to / "zero" / "optimizer_state.pt")
    for n, group in enumerate(run.groups):
        for name, weight in group.items():
            own = to / "zero" / name
            own.mkdir(exist_ok=True)
            for key in ("fp32", "exp_avg", "exp_avg_sq"):
                tensor = weight if key == "fp32" else run.state(key, name)
                whole = {"cat_dim": 0, "param": tensor}
                torch.save(tensor.flatten().clone() if sliced else whole, own / f"{key}.pt")
            if not sliced:
                torch.save(torch.tensor(2.0 + n), own / "step.pt")
    for name, buffer in (run.buffers | run.frozen).items() if not sliced else ():
        (to / "zero" / name).mkdir(exist_ok=True)
        torch.save({"param": buffer.float()}, to / "zero" / name / "fp32.pt")
    return to


def save_pipeline(folder: Path, stages: Sequence[Run]) -> Path:
    """Write a run of each stage; the first word of a name is the number of its layer."""
    to = folder / stages[0].tag
    to.mkdir(parents=True, exist_ok=True)
    (folder / "latest").write_text(to.name)
    layers = dict[int, OrderedDict[str, torch.Tensor]]()
    with classes_of_deepspeed() as classes:
        for stage, run in enumerate(stages):
            model = _model(run, 0)
            for key, tensor in model["module"].items():
                number, _, own = key.partition(".")
                layers.setdefault(int(number), OrderedDict())[own] = tensor
            model |= {"module": None, "mp_world_size": len(stages)}
            torch.save(model, to / f"mp_rank_{stage:02}_model_states.pt")
            for rank in range(run.ranks):
                states = _partitions(run, rank)
                states["loss_scaler"] = classes["LossScaler"](1.0)
                name = f"zero_pp_rank_{rank}_mp_rank_{stage:02}_optim_states.pt"
                torch.save({"optimizer_state_dict": states, "ds_config": {}}, to / name)
    for number, layer in layers.items():
        torch.save(layer, to / f"layer_{number:02}-model_states.pt")
    return to


def _model(run: Run, rank: int) -> dict[str, Any]:
    """The file of the model, or with stage 3 that of a rank."""
    sliced = run.stage == 3
    module: OrderedDict[str, torch.Tensor] = OrderedDict(run.buffers)
    trained = {n: w.to(run.dtype) for n, w in run.weights.items()}
    for name, weight in (trained | run.frozen).items():
        module[name] = torch.empty(0, dtype=run.dtype) if sliced else weight
    for name, owner in run.shared.items():
        module[name] = module[owner]
    return {
        "module": module,
        "buffer_names": list(run.buffers),
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, weight.shape) for name, weight in group.items())
            for group in run.groups
        ],
        "frozen_param_shapes": OrderedDict((n, w.shape) for n, w in run.frozen.items()),
        "shared_params": dict(run.shared),
        "frozen_param_fragments": OrderedDict(
            (name, _slice(weight, rank, run.ranks) if sliced else weight)
            for name, weight in run.frozen.items()
        ),
        "lr_scheduler": None,
        "global_steps": 2,
        "dp_world_size": run.ranks,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": run.stage}},
        "ds_version": "0.19.8",
        **run.client,
    }


def _slice(weight: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What a rank has of a weight with stage 3, with zeros at the end of the last ones."""
    each = -(-weight.numel() // ranks)
    padded = torch.zeros(each * ranks, dtype=weight.dtype)
    padded[: weight.numel()] = weight.flatten()
    return padded[rank * each : (rank + 1) * each].clone()


def _partitions(run: Run, rank: int) -> dict[str, Any]:
    """What a rank has of the optimizer, with stages 1 and 2."""
    flats: dict[str, list[torch.Tensor]] = {"fp32": [], "exp_avg": [], "exp_avg_sq": []}
    paddings = [list(each) for each in run.paddings] or [[0] * len(g) for g in run.groups]
    cut = list[int]()
    for group, after in zip(run.groups, paddings, strict=True):
        for key, found in flats.items():
            parts = list[torch.Tensor]()
            for (name, weight), padding in zip(group.items(), after, strict=True):
                parts += [(weight if key == "fp32" else run.state(key, name)).flatten()]
                parts += [torch.full((padding,), 9.0)]
            whole = torch.cat(parts)
            unit = 2 * run.ranks
            aligned = torch.zeros(-(-whole.numel() // unit) * unit)
            aligned[: whole.numel()] = whole
            each = aligned.numel() // run.ranks
            part = aligned[rank * each : (rank + 1) * each].clone()
            over = max(0, min(each, (rank + 1) * each - whole.numel()))
            found.append(part[: each - over] if key == "fp32" else part)
        cut.append(over)
    return {
        "overflow": False,
        "clip_grad": 1.0,
        "single_partition_of_fp32_groups": flats["fp32"],
        "base_optimizer_state": _adam(run, flats),
        "group_paddings": cut,
        "param_alignment_paddings": paddings,
        "partition_count": [run.ranks] * len(run.groups),
    }


def _slices(run: Run, rank: int) -> dict[str, Any]:
    """What a rank has of the optimizer, with stage 3."""
    flats: dict[str, list[torch.Tensor]] = {"fp32": [], "exp_avg": [], "exp_avg_sq": []}
    for group in run.groups:
        items = list(group.items())
        for n in range(run.subgroups):  # of whole parameters, as many in each
            part = items[n * len(items) // run.subgroups : (n + 1) * len(items) // run.subgroups]
            for key, found in flats.items():
                found.append(
                    torch.cat(
                        [
                            _slice(w if key == "fp32" else run.state(key, name), rank, run.ranks)
                            for name, w in part
                        ]
                    )
                )
    return {
        "overflow": False,
        "fp32_flat_groups": [torch.nn.Parameter(each) for each in flats["fp32"]],
        "optimizer_state_dict": _adam(run, flats, run.subgroups),
        "partition_count": run.ranks,
    }


def _adam(run: Run, flats: Mapping[str, Sequence[torch.Tensor]], each: int = 1) -> dict[str, Any]:
    """The state of Adam, of so many flat tensors for each group."""
    return {
        "state": {
            n: {
                "step": torch.tensor(2.0 + n // each),
                "exp_avg": flats["exp_avg"][n],
                "exp_avg_sq": flats["exp_avg_sq"][n],
            }
            for n in range(len(flats["fp32"]))
        },
        "param_groups": [
            {
                **torch.optim.Adam([torch.zeros(1)]).state_dict()["param_groups"][0],
                "lr": 0.1 / (1 + n),
                "params": list(range(n * each, n * each + each)),
            }
            for n in range(len(run.groups))
        ],
    }


@contextmanager
def classes_of_deepspeed() -> Iterator[dict[str, Any]]:
    """The classes that its pickles name, which are not there when they are read."""

    class LossScaler:
        def __init__(self, scale: float) -> None:
            self.cur_scale = scale
            self.dynamic = False

    class ZeroStageEnum(IntEnum):
        disabled = 0
        optimizer_states = 1
        gradients = 2
        weights = 3

    homes = {
        "deepspeed.runtime.fp16.loss_scaler": LossScaler,
        "deepspeed.runtime.zero.config": ZeroStageEnum,
    }
    made = list[str]()
    for home, cls in homes.items():
        cls.__module__, cls.__qualname__ = home, cls.__name__
        for n in range(1, home.count(".") + 2):
            package = ".".join(home.split(".")[:n])
            if package not in sys.modules:
                sys.modules[package] = types.ModuleType(package)
                made.append(package)
        setattr(sys.modules[home], cls.__name__, cls)
    try:
        yield {cls.__name__: cls for cls in homes.values()}
    finally:
        for package in made:
            del sys.modules[package]
