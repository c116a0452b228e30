"""Manifests that show themselves with `print` and in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ..manifest.manifest import Manifest
from . import inspect, live
from .blocks import Block, html_of, text_of

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, repr=False)
class FileManifest(Manifest):
    """The manifest of a checkpoint, as `inspect` returns it.

    `print` and notebooks show it as `ckptmove inspect` does. Otherwise it is a `Manifest`.
    """

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Build one from a plain manifest."""
        return cls(**{each.name: getattr(manifest, each.name) for each in fields(manifest)})

    def _blocks(self) -> Iterator[Block]:
        yield from inspect.blocks(self)
        if self.warnings:
            yield Block(("notes:",), after=[f"  - {each}" for each in self.warnings])

    def __str__(self) -> str:
        return "\n".join(text_of(self._blocks()))

    def _repr_html_(self) -> str:
        return html_of(self._blocks())


@dataclass(frozen=True, repr=False)
class LiveManifest(FileManifest):
    """The manifest of a model in memory, as `report` returns it.

    Attributes:
        inputs: where the inputs of the model should go, in words.
    """

    inputs: str = ""

    def _blocks(self) -> Iterator[Block]:
        return live.blocks(self, self.inputs)
