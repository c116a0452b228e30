"""State dicts and whole modules."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tests.making.registry import maker


class TinyNet(nn.Module):
    """Convolution, batch norm (with an integer buffer) and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = self.norm(self.conv(images)).mean((2, 3))
        result: torch.Tensor = self.head(pooled)
        return result


class TiedNet(nn.Module):
    """An embedding that shares its weight with the head, and attributes that name a device."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.device = torch.device("cuda", 0)
        self.device_name = "cuda:0"


def trained_net() -> TinyNet:
    """A TinyNet whose batch norm has seen a batch."""
    net = TinyNet()
    net(torch.randn(2, 1, 5, 5))
    return net


@maker
def linear_state_dict() -> object:
    return nn.Linear(3, 2).state_dict()


@maker
def transformer_state_dict() -> object:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
    return nn.TransformerEncoder(layer, 2).state_dict()


@maker
def conv_batchnorm_state_dict() -> object:
    return trained_net().state_dict()


@maker
def lstm_state_dict() -> object:
    return nn.LSTM(4, 3, num_layers=2, bidirectional=True).state_dict()


@maker
def parametrized_state_dict() -> object:
    return weight_norm(nn.Linear(3, 2)).state_dict()


@maker
def data_parallel_state_dict() -> object:
    return nn.Sequential(OrderedDict(module=trained_net())).state_dict()


@maker
def tied_weights() -> object:
    return TiedNet().state_dict()


@maker
def ema() -> object:
    net = trained_net()
    shadow = [parameter.detach().clone() for parameter in net.parameters()]
    return {
        "model": net.state_dict(),
        "ema": {"decay": 0.999, "num_updates": 7, "shadow_params": shadow, "collected_params": []},
        "live": [parameter.detach() for parameter in net.parameters()],  # the model's own storages
    }


@maker
def flat_parameter_views() -> object:
    flat = torch.randn(26)
    parts = torch.split(flat, [18, 3, 3, 2])
    return {"flat": flat, "views": {f"layer.{i}": part for i, part in enumerate(parts)}}


@maker
def whole_module() -> object:
    return trained_net()


@maker
def whole_tied_module() -> object:
    return TiedNet()
