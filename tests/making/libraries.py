"""Folders by libraries that are heavy to install: by them where they are, else as they say.

`scripts/libraries` installs them, and runs the tests with what they write. Elsewhere a folder is
written as the source of its library says, with files of the same names; of torchtune there is none.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn, optim

from tests.making.frameworks import (
    is_here,
    library,
    net_and_optimizer,
    on_the_host,
    quietly,
    saving,
)
from tests.making.saving import save

State = Mapping[str, object]

_SEED = 7


@contextmanager
def _trusting() -> Iterator[None]:
    """Libraries older than torch 2.6 load pickles of theirs that hold more than tensors."""
    with pytest.MonkeyPatch.context() as patch, quietly():
        patch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        yield


def _ranks(work: Callable[..., None], count: int, *given: str) -> None:
    """Have as many processes do what so many ranks do."""
    spawn = library("torch.multiprocessing").spawn
    with tempfile.TemporaryDirectory() as meet, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        spawn(work, (count, f"{meet}/store", *given), nprocs=count)


# DeepSpeed without ZeRO


def _engine(rank: int, count: int, meet: str, run: str, tag: str, result: str) -> None:
    """DeepSpeed trains from a run if it is there, else from the beginning, and saves it.

    What it then has is in the file `result`.
    """
    library("tests.making.mended_libraries")  # it looks for fairseq
    deepspeed = library("deepspeed")
    os.environ["LOCAL_RANK"] = str(rank)
    library("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False  # minutes to compile
    distributed.init_process_group("gloo", f"file://{meet}", rank=rank, world_size=count)
    torch.manual_seed(_SEED)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    adam = optim.AdamW(net.parameters())
    with quietly():
        engine, *_ = deepspeed.initialize(
            model=net,
            optimizer=adam,
            lr_scheduler=optim.lr_scheduler.StepLR(adam, 1),
            dist_init_required=False,
            config={"train_batch_size": 2, "zero_optimization": {"stage": 0}},
        )
    resumes = Path(run).exists()
    if resumes:
        path, _ = engine.load_checkpoint(run)
        assert path is not None
    torch.manual_seed(_SEED)
    for _ in range(2):
        engine.backward(engine(torch.rand(2, 3)).square().mean())
        engine.step()
    if not resumes:
        with saving(tag):
            engine.save_checkpoint(run)
    has = {"model": net.state_dict(), "optimizer": adam.state_dict(), "steps": engine.global_steps}
    torch.save(has, result)
    distributed.destroy_process_group()


def deepspeed_zero0(directory: Path, tag: str) -> Path:
    """DeepSpeed without ZeRO: one file has all (`runtime/engine.py`, `_save_checkpoint`)."""
    folder = directory / "run"
    if is_here("deepspeed"):
        directory.mkdir(parents=True, exist_ok=True)
        _ranks(_engine, 1, str(folder), tag, str(directory / "result.pt"))
        return folder
    net, optimizer = net_and_optimizer()
    (folder / "global_step2").mkdir(parents=True)
    saved: dict[str, object] = {
        "module": net.state_dict(),
        "buffer_names": [],
        "optimizer": {"optimizer_state_dict": optimizer.state_dict()},
        "param_shapes": None,
        "lr_scheduler": {"last_batch_iteration": 1},
        "sparse_tensor_module_names": set[str](),
        "skipped_steps": 0,
        "global_steps": 2,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": "0.17.1",
    }
    save(folder / "global_step2" / "mp_rank_00_model_states.pt", saved, tag, keep_cpu=on_the_host)
    (folder / "latest").write_text("global_step2")
    return folder


def deepspeed_goes_on(folder: Path, scratch: Path) -> State:
    """What DeepSpeed has after two more steps from such a folder."""
    library("deepspeed")
    scratch.mkdir()
    _ranks(_engine, 1, str(folder), "cpu", str(scratch / "result.pt"))
    result: State = torch.load(scratch / "result.pt", weights_only=True)
    assert result["steps"] == 4
    return result


# Meta's tensor-parallel parts


def _meta_rank(rank: int, count: int, meet: str, directory: str, tag: str, result: str) -> None:
    """What one of two ranks of Meta's llama does, with the layers of fairscale that it has.

    It saves its part; or, if it finds its part saved, loads it and takes a step. What it then has
    is in the folder `result`.
    """

    initialize, layers = (
        library(f"fairscale.nn.model_parallel.{name}") for name in ("initialize", "layers")
    )
    distributed.init_process_group("gloo", f"file://{meet}", rank=rank, world_size=count)
    initialize.initialize_model_parallel(count)
    torch.manual_seed(_SEED + rank)
    model = nn.ModuleDict(
        {
            "tok_embeddings": layers.ParallelEmbedding(8, 8),
            "wq": layers.ColumnParallelLinear(8, 16, bias=False),
            "wo": layers.RowParallelLinear(16, 8, bias=False, input_is_parallel=False),
            "norm": nn.LayerNorm(8),
        }
    )
    part = Path(directory) / f"consolidated.{rank:02}.pth"
    if not part.exists():
        with saving(tag):
            torch.save(model.state_dict(), part)
    else:
        model.load_state_dict(torch.load(part, weights_only=True))
        sgd = optim.SGD(model.parameters(), lr=0.1)
        x = torch.arange(8)
        for layer in model.values():
            x = layer(x)
        x.square().mean().backward()
        sgd.step()
        torch.save(model.state_dict(), Path(result) / f"{rank}.pt")
    distributed.destroy_process_group()


def meta_consolidated(directory: Path, tag: str) -> Path:
    """Weights as Meta publishes them: a file for each of two tensor-parallel ranks."""
    folder = directory / "llama"
    folder.mkdir(parents=True)
    if is_here("fairscale"):
        _ranks(_meta_rank, 2, str(folder), tag, str(directory))
    else:
        for rank in range(2):
            part = {
                "tok_embeddings.weight": torch.full((8, 4), rank + 0.5, dtype=torch.bfloat16),
                "layers.0.attention.wq.weight": torch.full((4, 8), rank + 1.5).bfloat16(),
                "norm.weight": torch.ones(8, dtype=torch.bfloat16),
            }
            save(folder / f"consolidated.{rank:02}.pth", part, tag)
    (folder / "params.json").write_text(json.dumps({"dim": 8, "n_layers": 1, "n_heads": 2}))
    (folder / "tokenizer.model").write_bytes(b"\x0a\x05<unk>")
    return folder


def meta_goes_on(folder: Path, scratch: Path) -> State:
    """What two ranks with the layers of fairscale have after a step from such a folder."""
    library("fairscale")
    scratch.mkdir()
    _ranks(_meta_rank, 2, str(folder), "cpu", str(scratch))
    return {str(n): torch.load(scratch / f"{n}.pt", weights_only=True) for n in range(2)}


# torchtune


def _tuned(first: Path, folder: Path, file: str, **options: Any) -> tuple[Any, Any, Any, Any]:
    """torchtune's checkpointer in Meta's form, a model, its optimizer, and what was loaded."""
    training = library("torchtune.training")
    checkpointer = training.FullModelMetaCheckpointer(
        str(first), [file], "LLAMA3", str(folder), **options
    )
    state = checkpointer.load_checkpoint()
    model = _llama()
    model.load_state_dict(state["model"])
    return checkpointer, model, optim.AdamW(model.parameters()), state


def _llama() -> Any:
    torch.manual_seed(_SEED)
    return library("torchtune.models.llama3").llama3(
        vocab_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        embed_dim=8,
        max_seq_len=8,
        intermediate_dim=8,
    )


def _tune(model: Any, optimizer: optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.randint(16, (2, 8))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def torchtune_run(directory: Path, tag: str) -> Path:
    """What torchtune saves in the middle of a training, in Meta's form."""
    first, folder = directory / "pretrained", directory / "tuned"
    convert = library("torchtune.models.convert_weights")
    first.mkdir(parents=True)
    torch.save(convert.tune_to_meta(_llama().state_dict()), first / "consolidated.00.pth")
    (first / "params.json").write_text("{}")
    checkpointer, model, adam, _ = _tuned(first, folder, "consolidated.00.pth")
    _tune(model, adam)
    state = {
        "model": model.state_dict(),
        "optimizer": adam.state_dict(),
        "epochs_run": 1,
        "total_epochs": 2,
        "seed": _SEED,
        "max_steps_per_epoch": None,
    }
    with saving(tag):
        checkpointer.save_checkpoint(state, epoch=0, intermediate_checkpoint=True)
    return folder


def torchtune_goes_on(folder: Path, scratch: Path) -> State:
    """What torchtune has after two more steps from such a folder."""
    scratch.mkdir()
    (path,) = (folder / "epoch_0").glob("*.bin")
    file = f"epoch_0/{path.name}"
    _, model, adam, state = _tuned(scratch, folder, file, should_load_recipe_state=True)
    adam.load_state_dict(state["optimizer"])
    torch.manual_seed(_SEED)
    _tune(model, adam)
    return {"model": model.state_dict(), "optimizer": adam.state_dict()}


# MMEngine


def _runner(work: Path, epochs: int, **options: Any) -> Any:
    base: Any = library("mmengine.model").BaseModel

    class Net(base):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

        def forward(self, inputs: torch.Tensor, mode: str) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(inputs + torch.rand(3)).square().mean()}

    torch.manual_seed(_SEED)
    data: Any = [{"inputs": torch.full((3,), n / 8)} for n in range(8)]
    return library("mmengine.runner").Runner(
        Net(),
        str(work),
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=2),
        train_cfg={"by_epoch": True, "max_epochs": epochs},
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.1}},
        param_scheduler={"type": "StepLR", "step_size": 1},
        randomness={"seed": _SEED},
        experiment_name=f"{work}-{epochs}",
        log_level="ERROR",
        **options,
    )


def mmengine_run(directory: Path, tag: str) -> Path:
    """The work folder of a Runner of MMEngine (`runner/runner.py`, `save_checkpoint`)."""
    folder = directory / "work"
    if is_here("mmengine"):
        with saving(tag):
            _runner(folder, 2).train()
        return folder
    net, optimizer = net_and_optimizer()
    (folder / "20260102_030405" / "vis_data").mkdir(parents=True)
    for epoch in (1, 2):
        saved = {
            "meta": {"epoch": epoch, "iter": 4 * epoch, "seed": _SEED, "dataset_meta": {}},
            "state_dict": OrderedDict(net.state_dict()),
            "message_hub": {"log_scalars": {}, "runtime_info": {}, "resumed_keys": {}},
            "optimizer": optimizer.state_dict(),
            "param_schedulers": [{"last_step": epoch}],
        }
        save(folder / f"epoch_{epoch}.pth", saved, tag, keep_cpu=on_the_host)
    (folder / "last_checkpoint").write_text("epoch_2.pth")
    (folder / "20260102_030405.py").write_text("model = dict()\n")
    (folder / "20260102_030405" / "vis_data" / "scalars.json").write_text("{}\n")
    return folder


def mmengine_goes_on(folder: Path, scratch: Path) -> State:
    """What MMEngine has after another epoch from such a folder."""
    library("mmengine")
    with _trusting():
        runner = _runner(scratch, 3, load_from=str(folder / "epoch_2.pth"), resume=True)
        runner.train()
    assert runner.epoch == 3
    return {
        "model": runner.model.state_dict(),
        "optimizer": runner.optim_wrapper.state_dict(),
        "random": torch.rand(2),
    }


# fairseq

_FAIRSEQ = (
    "--task dummy_lm --dict-size 16 --tokens-per-sample 8 --dataset-size 8 --batch-size 2 --cpu "
    "--arch transformer_lm --decoder-embed-dim 8 --decoder-ffn-embed-dim 8 --decoder-layers 1 "
    "--decoder-attention-heads 2 --decoder-learned-pos --optimizer adam --lr 0.1 --num-workers 0 "
    "--no-epoch-checkpoints"
)


def _fairseq(folder: Path) -> tuple[Any, Any, Any]:
    """The configuration of a training with fairseq, and what goes on from the folder, if it can."""
    options, utils = library("fairseq.options"), library("fairseq.dataclass.utils")
    words = [*_FAIRSEQ.split(), "--save-dir", str(folder)]
    with _trusting():
        parsed = options.parse_args_and_arch(options.get_training_parser(), words)
        cfg = utils.convert_namespace_to_omegaconf(parsed)
        task = library("fairseq.tasks").setup_task(cfg.task)
        task.load_dataset("train")
        torch.manual_seed(_SEED)
        parts = task.build_model(cfg.model), task.build_criterion(cfg.criterion)
        trainer = library("fairseq.trainer").Trainer(cfg, task, *parts)
        checkpoints = library("fairseq.checkpoint_utils")
        _, epochs = checkpoints.load_checkpoint(cfg.checkpoint, trainer)
        for sample in epochs.next_epoch_itr():
            trainer.train_step([sample])
    return cfg, trainer, epochs


def fairseq_run(directory: Path, tag: str) -> Path:
    """The checkpoints of a run of fairseq (`trainer.py`, `state_dict`)."""
    folder = directory / "checkpoints"
    if is_here("fairseq"):
        cfg, trainer, epochs = _fairseq(folder)
        with saving(tag):
            library("fairseq.checkpoint_utils").save_checkpoint(
                cfg.checkpoint, trainer, epochs, 0.5
            )
        return folder
    net, optimizer = net_and_optimizer()
    folder.mkdir(parents=True)
    saved = {
        "args": argparse.Namespace(arch="tiny", device="cuda:0", lr=[1e-3]),
        "cfg": None,
        "model": net.state_dict(),
        "criterion": {},
        "optimizer_history": [{"optimizer_name": "FairseqAdam", "num_updates": 2}],
        "task_state": {},
        "extra_state": {"metrics": OrderedDict(), "previous_training_time": 1.5},
        "last_optimizer_state": optimizer.state_dict(),
    }
    for name in ("checkpoint_best.pt", "checkpoint_last.pt"):
        save(folder / name, saved, tag, keep_cpu=on_the_host)
    return folder


def fairseq_goes_on(folder: Path, scratch: Path) -> State:
    """What fairseq has after another epoch from such a folder."""
    _, trainer, _ = _fairseq(folder)
    assert trainer.get_num_updates() == 8
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "random": torch.rand(2),
    }
