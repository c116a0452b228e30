"""Training checkpoints: optimizers that really stepped, schedulers, scalers, RNG states."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn, optim

from tests.making.modules import TinyNet, trained_net
from tests.making.registry import maker, register

MakeOptimizer = Callable[[Iterator[nn.Parameter]], optim.Optimizer]


def stepped(make: MakeOptimizer, steps: int = 2) -> tuple[TinyNet, optim.Optimizer]:
    """A net and an optimizer that took some steps on it."""
    net = TinyNet()
    optimizer = make(net.parameters())
    for _ in range(steps):
        step(net, optimizer)
    return net, optimizer


def step(net: nn.Module, optimizer: optim.Optimizer) -> None:
    images = torch.randn(2, 1, 5, 5)

    def loss() -> float:
        optimizer.zero_grad()
        value = net(images).square().mean()
        value.backward()
        return float(value.detach())

    optimizer.step(loss)


def checkpoint(net: nn.Module, optimizer: optim.Optimizer, **more: object) -> dict[str, object]:
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), **more}


def rng_states() -> dict[str, object]:
    """Python's, NumPy's and torch's generators, as scripts save them."""
    return {
        "python": random.Random(0).getstate(),
        "numpy": np.random.RandomState(0).get_state(),
        "cpu": torch.get_rng_state(),
        "cuda": [torch.arange(16, dtype=torch.uint8)],
    }


def hyper_parameters() -> argparse.Namespace:
    return argparse.Namespace(
        lr=1e-3,
        device="cpu",
        devices=["cuda:0", torch.device("cuda", 1)],
        map_location=torch.device("cpu"),
        resume=None,
    )


@maker
def adamw_training() -> object:
    net, optimizer = stepped(optim.AdamW)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    more = {"scheduler": scheduler.state_dict(), "scaler": scaler.state_dict()}
    return checkpoint(net, optimizer, **more, rng=rng_states(), epoch=3, args=hyper_parameters())


@maker
def adamw_weights_only() -> object:
    net, optimizer = stepped(optim.AdamW)
    return checkpoint(net, optimizer, rng=torch.get_rng_state(), epoch=3, device="cpu")


@maker
def adam_groups() -> object:
    net = TinyNet()
    groups: list[dict[str, Any]] = [
        {"params": net.conv.parameters(), "lr": 1e-2},
        {"params": net.norm.parameters(), "weight_decay": 0.0},
        {"params": net.head.parameters(), "betas": (0.5, 0.9), "name": "head"},
    ]
    optimizer = optim.Adam(groups, lr=1e-3, amsgrad=True)
    step(net, optimizer)
    return checkpoint(net, optimizer)


@maker
def adam_mixed_capturable() -> object:
    """One group with steps on the device, one with steps on the CPU."""
    net = TinyNet()
    groups: list[dict[str, Any]] = [{"params": [part]} for part in net.head.parameters()]
    optimizer = optim.Adam(groups)
    step(net, optimizer)
    optimizer.param_groups[0]["capturable"] = True
    return checkpoint(net, optimizer)


@maker
def adam_capturable() -> object:
    net, optimizer = stepped(optim.Adam)
    for group in optimizer.param_groups:
        group["capturable"] = True  # a CPU step would refuse it
    return checkpoint(net, optimizer)


@maker
def adam_never_stepped() -> object:
    return checkpoint(*stepped(optim.Adam, steps=0))


@maker
def adam_tensor_lr() -> object:
    return checkpoint(*stepped(lambda params: optim.Adam(params, lr=torch.tensor(1e-3))))


@maker
def gan() -> object:
    nets = {"generator": trained_net(), "discriminator": trained_net()}
    optimizers = {f"{name}_optimizer": optim.Adam(net.parameters()) for name, net in nets.items()}
    for net, optimizer in zip(nets.values(), optimizers.values(), strict=True):
        step(net, optimizer)
    saved: dict[str, nn.Module | optim.Optimizer] = {**nets, **optimizers}
    return {name: part.state_dict() for name, part in saved.items()}


@maker
def sparse_adam() -> object:
    net = nn.Embedding(6, 4, sparse=True)
    optimizer: optim.Optimizer = optim.SparseAdam(list(net.parameters()))
    net(torch.tensor([1, 4])).sum().backward()
    optimizer.step()
    return checkpoint(net, optimizer)


@maker
def muon() -> object:
    net = nn.Linear(4, 3, bias=False)
    optimizer: optim.Optimizer = optim.Muon(net.parameters())
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return checkpoint(net, optimizer)


@maker
def named_parameter_optimizer() -> object:
    """param_groups that carry param_names, as optimizers made from named_parameters() do."""
    net = TinyNet()
    optimizer = optim.AdamW(net.named_parameters())
    step(net, optimizer)
    return checkpoint(net, optimizer)


@maker
def whole_optimizer() -> object:
    net, optimizer = stepped(optim.AdamW)
    return {"model": net, "optimizer": optimizer}


@maker
def rng_state_file() -> object:
    """rng_state.pth of the Hugging Face trainer: its key "cpu" is the location tag's own string."""
    return rng_states()


OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "sgd_momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd_fused": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adam_fused": (optim.Adam, {"fused": True}),
    "adamw_fused": (optim.AdamW, {"fused": True}),
    "adamax": (optim.Adamax, {}),
    "adagrad": (optim.Adagrad, {}),
    "adadelta": (optim.Adadelta, {}),
    "nadam": (optim.NAdam, {}),
    "radam": (optim.RAdam, {}),
    "rmsprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "rprop": (optim.Rprop, {}),
    "asgd": (optim.ASGD, {}),
    "adafactor": (optim.Adafactor, {}),
    "lbfgs": (optim.LBFGS, {"max_iter": 4, "history_size": 3}),
}


def _stepped_checkpoint(name: str) -> Callable[[], object]:
    kind, options = OPTIMIZERS[name]
    make: Callable[..., optim.Optimizer] = kind
    return lambda: checkpoint(*stepped(lambda params: make(params, **options)))


for _name in OPTIMIZERS:
    register(_name, _stepped_checkpoint(_name))
