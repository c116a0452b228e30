"""Causes that the text of a torch exception names by itself, without a recording.

The texts are those of torch 2.x on CUDA; `trial/simulation` raises the same ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ....reports.doctor import Verdict
from ..program.syntax import code_at, line_that_sets, names_given
from ..recording.history import with_code
from .background import Background

_AT = re.compile(r" \(at (?P<line>[^()]*)\)$")


class Refusal(NamedTuple):
    """A text of a torch exception, and its cause.

    `title` and `fix` are formatted with the groups of the pattern; `line`, where it was raised; the
    `code` there; the `receiver` of the call; and `device`, the target device.
    """

    pattern: re.Pattern[str]
    cause: str
    title: str
    fix: str


_REFUSALS = (
    Refusal(
        re.compile(r"can't convert (?P<found>\S+) device type tensor to numpy"),
        "host-value",
        "NumPy reads only the CPU's memory, and is given a tensor on {found} at {line}",
        "bring it first: x.detach().cpu().numpy(); of a loss that is kept, loss.item()",
    ),
    Refusal(
        re.compile(
            r"'lengths' argument should be a 1D CPU int64 tensor, but got \S+ (?P<found>\S+)"
        ),
        "host-value",
        "the lengths of packed sequences are on {found} at {line}; torch wants them on cpu",
        "lengths.cpu() there; move the sequences alone",
    ),
    Refusal(
        re.compile(
            r"Expected a '?cpu'? (?:device type|generator device) for generator but found "
            r"'?(?P<found>[a-z]+)[\w:]*'?"
        ),
        "generator-elsewhere",
        "the generator is on {found}, and the random numbers are made on cpu at {line}",
        'generator = torch.Generator("cpu")',
    ),
    Refusal(
        re.compile(
            r"Expected a '?(?P<wanted>[\w:]+)'? (?:device type|generator device) for generator but "
            r"found '?(?P<found>[\w:]+)'?"
        ),
        "generator-elsewhere",
        "the generator is on {found}, and the random numbers are made on {wanted} at {line}",
        'generator = torch.Generator("{device}"); after torch.set_default_device, a DataLoader '
        'that shuffles needs DataLoader(…, generator=torch.Generator("{device}"))',
    ),
    Refusal(
        re.compile(r"Cannot re-initialize CUDA in forked subprocess"),
        "device-in-worker",
        "a worker of the DataLoader uses {device} at {line}, which a forked process can't",
        "let the dataset give tensors on the CPU, and move each batch in the loop",
    ),
    Refusal(
        re.compile(r"cannot pin '(?P<type>\S+)'"),
        "pinned-elsewhere",
        "pin_memory is given what is on {device} already ({type}) at {line}",
        "drop pin_memory=True; or let the dataset give tensors on the CPU, and move each batch",
    ),
    Refusal(
        re.compile(r"Encountered different devices in metric .*`metric=(?P<kind>\w+)\("),
        "criterion-never-moved",
        "the metric {kind} is on another device than what it is given: `{code}` at {line}",
        '{receiver}.to("{device}"); as an attribute of the model, it is moved with that',
    ),
    Refusal(
        re.compile(
            r"Torch not compiled with (?P<kind>\w+) enabled|Found no (?P<maker>NVIDIA) driver"
            r"|No CUDA GPUs are available"
        ),
        "device-not-usable",
        "the script asks for a GPU at {line}, and torch can use none on this machine",
        '"cuda" if torch.cuda.is_available() else "cpu" there; ckptmove doctor --device cuda:0 '
        "says why torch can't, and with --simulate it runs the script on a simulated GPU",
    ),
    Refusal(
        re.compile(r"invalid device ordinal: (?P<found>\S+), beside (?P<only>\S+) alone"),
        "device-not-usable",
        "the script names {found} at {line}, and the simulated machine has {only} alone",
        'name "{device}" there, or choose by torch.cuda.device_count(); if the machine has '
        "{found}, say --device {found}",
    ),
    Refusal(
        re.compile(
            r"invalid device ordinal|Invalid device id"
            r"|deserialize object on (?:CUDA|cuda) device (?P<index>\d+) but"
        ),
        "device-not-usable",
        "the script names a GPU at {line} that is not there",
        'name "{device}" there, or choose by torch.cuda.device_count()',
    ),
    Refusal(
        re.compile(r"RNG state must be a torch\.ByteTensor"),
        "host-value",
        "the state of a random number generator is not on cpu at {line}; torch wants it there",
        'state.cpu() there; or load it with map_location="cpu"',
    ),
    Refusal(
        re.compile(r"can't optimize a non-leaf Tensor"),
        "parameter-moved",
        "the optimizer at {line} is given a copy of a parameter, which can't be trained",
        "move the values before they become a parameter: "
        'nn.Parameter(values.to("{device}")), or torch.randn(…, device=…, requires_grad=True)',
    ),
    Refusal(
        re.compile(
            r"on device (?P<first>\S+) \(device_ids\[0\]\) but found one of them on device: "
            r"(?P<found>(?!cpu)\w+:(?P<index>\d+))"
        ),
        "model-never-moved",
        "DataParallel starts from {first} (device_ids[0]), and its model is on {found}, at {line}",
        'model.to("{first}"); or name its device first: '
        "nn.DataParallel(model, device_ids=[{index}])",
    ),
)


def refusal(failed: str, device: str, known: Background) -> Verdict | None:
    """The verdict for an exception whose text tells the cause; None for other texts.

    Args:
        failed: the exception in one line, from `source_lines.error_line`.
        device: the target device, where everything should be.
        known: facts about the program.
    """
    at = _AT.search(failed)
    line = at["line"].rpartition("called at ")[2] if at else "an unknown line"
    for pattern, cause, title, fix in _REFUSALS:
        found = pattern.search(failed)
        if found is not None:
            groups = {**found.groupdict(), "line": line, "device": device, "code": code_at(line)}
            groups["receiver"] = known.receiver or groups.get("kind")
            evidence = (failed, *_lines_behind(cause, groups, known))
            return Verdict(cause, title.format(**groups), fix.format(**groups), evidence)
    return None


def _lines_behind(cause: str, groups: Mapping[str, Any], known: Background) -> Iterator[str]:
    """The code that made the refused object, if it is known."""
    history = known.history
    if cause == "host-value" and known.given_at:
        yield f"it was given there at {known.given_at}"
    if cause == "criterion-never-moved" and known.receiver_made:
        yield known.receiver_made
    if history is None:
        return
    if cause == "device-not-usable" and groups.get("found"):
        line = str(groups["line"])
        set_at = (line_that_sets(line, name) for name in names_given(line))
        yield from map(with_code, dict.fromkeys(filter(None, set_at)))
        yield from map(with_code, history.devices_named(groups["found"]))
    if cause == "generator-elsewhere":
        made = history.generators_on(groups["found"] or "cpu")
        yield from map(with_code, made or [each.line for each in history.loaders if each.shuffles])
    elif cause == "pinned-elsewhere":
        yield from (with_code(each.line) for each in history.loaders if each.pins)
    elif cause == "device-in-worker":
        yield from (with_code(each.line) for each in history.loaders if each.forks)
