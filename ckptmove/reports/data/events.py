"""What was recorded of a run: operations by device and module, and what is worth a look.

Plain data, which holds on to no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


class Site(NamedTuple):
    """Where something happens.

    Attributes:
        phase: `forward`, `backward` or `optimizer`; "" outside of all.
        module: the dotted name of the module that runs; "" for none, or the model itself.
        op: the operation, e.g. `aten.add.Tensor`; `call` for the model's being called.
        source: the first line outside of torch and ckptmove, `file.py:12`, in a backward pass that
            of the operation whose gradient is computed; "" if there is none.
    """

    phase: str
    module: str
    op: str
    source: str

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        where = where or (f" in {self.phase}" if self.phase else "")
        return f"{self.op}{where}{f' at {self.source}' if self.source else ''}"


class Operand(NamedTuple):
    """What an operation took.

    Attributes:
        name: by which the model or its caller knows it; or what made it, and where.
        device: where it is.
        shape: its sizes.
        held: how the model holds it (`inventory.holdings.Ownership`), `input`, `made`, or "" if
            unknown.
        module: the module that holds it, or in which it was made.
        variable: what the code that used it calls it, or "".
        owner: what the user calls the model that holds it, or its class; or "".
    """

    name: str
    device: str
    shape: tuple[int, ...]
    held: str = ""
    module: str = ""
    variable: str = ""
    owner: str = ""

    def __str__(self) -> str:
        return f"{self.name} is on {self.device}"


@dataclass(frozen=True)
class Happening:
    """Something that happened at a site.

    Attributes:
        kind: `stray`: computed on another device than the model's; `created`: a tensor made on
            another device; `transfer`: copied between devices; `sync`: the host waits for a value;
            `mixed`: computed on the model's device, of tensors that are elsewhere too; `input`: the
            model was called with tensors that are elsewhere; `dropped`: copied to the model's
            device, and the copy never used, but what was copied was.
        site: where.
        devices: the device; of a transfer, from and to.
        count: how often.
        nbytes: of the tensors that were copied or made.
        operands: what was elsewhere, or was copied, the first time.
        asked: whether the user's own code asked for it while training, and no library.
        turns: in how many steps, or calls without any.
    """

    kind: str
    site: Site
    devices: str
    count: int
    nbytes: int
    operands: tuple[Operand, ...] = ()
    asked: bool = False
    turns: int = 1

    def __str__(self) -> str:
        times = f", {self.count:,} times" if self.count > 1 else ""
        size = f", {self.nbytes:,} bytes" if self.nbytes else ""
        return f"{self.site} ({self.devices}{size}{times})"


class Usage(NamedTuple):
    """What ran on a device: operations, and the bytes of what they made."""

    operations: int
    nbytes: int


@dataclass(frozen=True)
class Trace:
    """What was recorded.

    Attributes:
        device: where everything was meant to happen.
        operations: how many, by device; those on no tensor at all count for none.
        phases: how many, by phase.
        modules: by the name of a module, "" for the model itself and outside of it: by device.
        calls: how often the model was called.
        steps: how many steps the optimizer took.
        sites: how many different ones.
        happenings: what is worth a look, the most frequent first.
        dropped: how many happenings are not told apart, for there were too many sites.
        error: where an exception came out of an operation, or None.
        operands: what that operation took.
        said: the exception in a line, whether or not somebody caught it; or None.
    """

    device: str
    operations: Mapping[str, int]
    phases: Mapping[str, int]
    sites: int
    happenings: Sequence[Happening]
    dropped: int
    error: Site | None
    modules: Mapping[str, Mapping[str, Usage]] = field(default_factory=dict)
    calls: int = 0
    steps: int = 0
    operands: tuple[Operand, ...] = ()
    said: str | None = None

    def of(self, *kinds: str) -> list[Happening]:
        """What happened of some kinds."""
        return [each for each in self.happenings if each.kind in kinds]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "device": self.device,
            "operations": dict(self.operations),
            "phases": dict(self.phases),
            "modules": {
                name: {device: usage._asdict() for device, usage in each.items()}
                for name, each in self.modules.items()
            },
            "calls": self.calls,
            "steps": self.steps,
            "sites": self.sites,
            "dropped": self.dropped,
            "happenings": [
                {
                    **asdict(each),
                    "site": each.site._asdict(),
                    "operands": [operand._asdict() for operand in each.operands],
                }
                for each in self.happenings
            ],
            "error": None if self.error is None else self.error._asdict(),
            "operands": [operand._asdict() for operand in self.operands],
            "said": self.said,
        }

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Trace:
        """What `to_json` gave, as another process tells it."""
        error = data["error"]
        return cls(
            **{
                **data,
                "modules": {
                    name: {device: Usage(**usage) for device, usage in each.items()}
                    for name, each in data["modules"].items()
                },
                "happenings": tuple(
                    Happening(
                        **{
                            **each,
                            "site": Site(**each["site"]),
                            "operands": _operands(each["operands"]),
                        }
                    )
                    for each in data["happenings"]
                ),
                "error": None if error is None else Site(**error),
                "operands": _operands(data["operands"]),
            }
        )


def _operands(data: Sequence[Mapping[str, Any]]) -> tuple[Operand, ...]:
    return tuple(Operand(**{**each, "shape": tuple(each["shape"])}) for each in data)
