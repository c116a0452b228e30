"""The register of makers: a name for every object worth saving."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch

Maker = Callable[[], object]

MAKERS: dict[str, Maker] = {}


def register(name: str, make: Maker) -> Maker:
    """Register `make` under `name`, seeded so that it makes the same bytes each time."""

    @functools.wraps(make)
    def seeded() -> object:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sparse, nested and quantised tensors
            torch.manual_seed(0)
            return make()

    if name in MAKERS:
        raise ValueError(f"two makers are called {name}")
    MAKERS[name] = seeded
    return seeded


def maker(make: Maker) -> Maker:
    """Register a function under its own name."""
    return register(make.__name__, make)
