"""torch-export: the format of `torch.export.save` (`.pt2`).

    P/archive_format, archive_version     "pt2", "0"
    P/models/NAME.json                    the program: a graph that names devices
    P/data/weights/NAME_weights_config.json    name of a weight → its record, dtype, sizes, device
    P/data/weights/weight_N               raw bytes, or a torch-zip file (tensor subclasses)
    P/data/constants/…                    the same, with `tensor_N`; or objects
    P/data/sample_inputs/NAME.pt          a torch-zip file
    P/data/aotinductor/…                  compiled programs

torch 2.8 wrote one torch-zip file for each: `data/weights/NAME.pt` and `data/constants/NAME.pt`.
torch 2.1 to 2.7 wrote a zip with Python's zipfile, with `serialized_exported_program.json`,
`serialized_state_dict.pt`, `serialized_constants.pt` and `serialized_example_inputs.pt`.

Relocating changes configs, graphs, autocast regions and sample inputs together. The result is the
program that `torch.export.passes.move_to_device_pass` would make, with its autocast regions moved
too. A program is moved as a whole or not at all, and not if anything in it is unknown or compiled.

Sources: torch/export/pt2_archive/_package.py and constants.py; torch/export/__init__.py (`load`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ...errors import UnsupportedError, WriteError
from ...manifest.device import kind_of
from ...manifest.manifest import Manifest, TensorEntry
from ...manifest.other_records import NamedDevice
from ...manifest.paths import spell
from ...placement.place import Moves
from ...plans.plan import Plan
from ...torch_pickle.sections.tensor_names import with_shared
from ..archives.documents import Changes, Json
from ..archives.zip_container import prefix_of
from ..base import Format
from ..checkpoint import Carries, Checkpoint
from ..probe import Probe
from .export_archive import OLD_PROGRAM, ExportContainer
from .export_graph import DeviceMention

_MOST_REASONS = 3


class TorchExport(Format):
    """The format of `torch.export.save`."""

    name = "torch-export"
    suffixes = (".pt2",)
    summary = "torch.export.save, torch 2.1 and newer"
    refused = (
        "to relocate what is compiled for its device (AOTInductor) or holds objects, "
        "which cannot follow; to move a program in part, since it would not run"
    )
    carries = Carries(devices=True, aliases=True, strides=True, objects=True, dtypes="all of torch")

    def sniff(self, probe: Probe) -> bool:
        """Whether it is a zip with `archive_format`, or with a program of torch 2.1 to 2.7."""
        if probe.archive is None:
            return False
        records = probe.archive.records
        return f"{prefix_of(probe.archive)}archive_format" in records or OLD_PROGRAM in records

    def read(self, probe: Probe) -> ExportCheckpoint:
        """Read everything but the tensors."""
        assert probe.archive is not None
        container = ExportContainer(probe.archive, probe.session)
        return ExportCheckpoint(self.name, container, self.carries)


class ExportCheckpoint(Checkpoint):
    """An exported program as a checkpoint."""

    container: ExportContainer

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest: raw tensors first, then pickled ones."""
        found, container = super().manifest, self.container
        devices = [
            NamedDevice(place.path, spell(place.path), place.device, place.kind)
            for place in container.places
        ]
        devices += [
            NamedDevice(path, spell(path), kind, "compiled for")
            for path, kind in container.compiled
        ]
        return replace(
            found,
            tensors=tuple(with_shared([*self._raw, *found.tensors])),
            values_naming_devices=(*found.values_naming_devices, *devices),
            objects={**found.objects, **container.objects},
        )

    @cached_property
    def _raw(self) -> list[TensorEntry]:
        return [weight.entry for weight in self.container.weights]

    def raw(self) -> list[TensorEntry]:
        return [each for each in self._raw if each.storage is not None]

    def plan_relocate(self, moves: Moves) -> Plan:
        if moves:
            self._refuse(moves)
        new = {
            name: self.container.documents[name].rewrite(changes)
            for name, changes in self._changes(moves).items()
        }
        return self.container.plan_with(self.spelling(self._moves_of_pickles(moves)), new)

    def _refuse(self, moves: Moves) -> None:
        """Raises UnsupportedError if anything that depends on the devices is not understood."""
        reasons = list(self.container.obstacles)
        first = len(self.contents.values)
        changed = [
            (place, moves.values[first + n])
            for n, place in enumerate(self.container.places)
            if first + n in moves.values
        ]
        kinds = [place for place, device in changed if kind_of(place.device) != kind_of(device)]
        reasons += [
            f"the autocast region at {spell(place.path)!r} works on one kind of "
            f"device only: {place.fixed}"
            for place in kinds
            if place.fixed
        ]
        if kinds and self.container.bound:
            bound = self.container.bound[0]
            reasons.append(f"the operator {bound!r} works on one kind of device only")
        if reasons:
            more = len(reasons) - _MOST_REASONS
            told = "; ".join(reasons[:_MOST_REASONS]) + (f"; and {more:,} more" if more > 0 else "")
            raise UnsupportedError(
                f"the program can't be relocated: {told}",
                hint="export it again on the other device",
            )

    def _moves_of_pickles(self, moves: Moves) -> Moves:
        """The moves of the pickled contents, with indexes of their own."""
        first, values = len(self._raw), len(self.contents.values)
        return Moves(
            storages=moves.storages,
            tensors={n - first: device for n, device in moves.tensors.items()},
            meshes=moves.meshes,
            values={n: device for n, device in moves.values.items() if n < values},
        )

    def _changes(self, moves: Moves) -> dict[str, dict[int, dict[str, Json]]]:
        """The changes in each JSON record."""
        changes: dict[str, dict[int, dict[str, Json]]] = {}

        def change(record: str, place: DeviceMention, device: str) -> None:
            changes.setdefault(record, {})[id(place.holder)] = place.with_device(device)

        for weight in self.container.weights:
            device = moves.storages.get(weight.entry.storage or "")
            if device is not None:
                change(weight.config, weight.place, device)
        first = len(self.contents.values)
        for n, (record, place) in enumerate(
            zip(self.container.place_records, self.container.places, strict=True)
        ):
            if first + n in moves.values:
                change(record, place, moves.values[first + n])
        return changes

    def check_relocated(self, other: Checkpoint, moves: Moves) -> None:
        super().check_relocated(other, self._moves_of_pickles(moves))
        assert isinstance(other, ExportCheckpoint)
        all_changes = self._changes(moves)
        for name, document in self.container.documents.items():
            changes: Changes = all_changes.get(name, {})
            if document.differs(other.container.documents[name], changes):
                raise WriteError(f"the written file differs from the source in {name!r}")
