"""What the path to a value tells about its section."""

from __future__ import annotations

from typing import NamedTuple

from ...manifest.manifest import Role, Section
from ..pickled_modules import Way
from .sections import Rng


class Context(NamedTuple):
    """What the way to a node says about it."""

    section: Section = Section.OTHER
    role: Role | None = None
    part_of: str | None = None
    averaged: bool = False  # below a key that speaks of averages of weights, or in one
    rng: Rng = Rng.UNKNOWN
    in_set: bool = False
    data: bool = False  # in what a model learns from
    state: bool = False  # right in a state dict, where numpy's arrays are weights
    model_at: int | None = None  # the depth of the model's state dict, inside of one
    weights_at: int | None = None  # the depth of what holds all of a model's weights
    way: Way | None = None  # within modules that were pickled whole


def towards(context: Context, averaged: bool | None) -> Context:
    """What the way to one of the things in a container says, if its key speaks of averages."""
    if averaged is None:
        return context
    section = context.section
    if section in (Section.MODEL, Section.EMA):
        section = Section.EMA if averaged else Section.MODEL
    return context._replace(averaged=averaged, section=section)
