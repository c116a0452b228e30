"""What an exception of torch says of devices by itself, whatever was recorded.

Its texts are those of torch 2.x on CUDA, which `trial/simulation` raises too.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ...reports.doctor import Verdict

_AT = re.compile(r" \(at (?P<line>[^()]*)\)$")
_NUMPY = re.compile(r"can't convert (?P<device>\S+) device type tensor to numpy")
_LENGTHS = re.compile(
    r"'lengths' argument should be a 1D CPU int64 tensor, but got \S+ (?P<is>\S+)"
)
_GENERATOR = re.compile(
    r"Expected a '?(?P<wanted>[\w:]+)'? (?:device type|generator device) for generator but "
    r"found '?(?P<is>[\w:]+)'?"
)
_FORKED = re.compile(r"Cannot re-initialize CUDA in forked subprocess")
_PINNED = re.compile(r"cannot pin '(?P<type>\S+)'")
_NO_LEAF = re.compile(r"can't optimize a non-leaf Tensor")


def refusal(failed: str, device: str) -> Verdict | None:
    """What is wrong if torch says so; None if its text leaves that open.

    Args:
        failed: the exception in a line, as `source_lines.said` gives it.
        device: where everything is meant to be.
    """
    at = _AT.search(failed)
    line = at["line"] if at else "an unknown line"
    for pattern, verdict in _REFUSALS:
        found = pattern.search(failed)
        if found is not None:
            cause, title, fix = verdict(found, line, device)
            return Verdict(cause, title, fix, (failed,))
    return None


_Found = tuple[str, str, str]  # cause, title, fix


def _numpy(found: re.Match[str], line: str, device: str) -> _Found:
    return (
        "host-value",
        f"NumPy reads only the CPU's memory, and is given a tensor on {found['device']} at {line}",
        "bring it first: x.detach().cpu().numpy(); of a loss that is kept, loss.item()",
    )


def _lengths(found: re.Match[str], line: str, device: str) -> _Found:
    return (
        "host-value",
        f"the lengths of packed sequences are on {found['is']} at {line}; torch wants them on cpu",
        "lengths.cpu() there; move the sequences alone",
    )


def _generator(found: re.Match[str], line: str, device: str) -> _Found:
    wanted = found["wanted"]
    made = f'torch.Generator("{device if wanted != "cpu" else "cpu"}")'
    fix = f"generator = {made}"
    if wanted != "cpu":
        fix += (
            "; after torch.set_default_device, a DataLoader that shuffles needs "
            f"DataLoader(…, generator={made})"
        )
    return (
        "generator-elsewhere",
        f"the generator is on {found['is']}, and the random numbers are made on {wanted} at {line}",
        fix,
    )


def _forked(found: re.Match[str], line: str, device: str) -> _Found:
    return (
        "device-in-worker",
        f"a worker of the DataLoader uses {device} at {line}, which a forked process can't",
        "let the dataset give tensors on the CPU, and move each batch in the loop",
    )


def _pinned(found: re.Match[str], line: str, device: str) -> _Found:
    return (
        "pinned-elsewhere",
        f"pin_memory is given what is on {device} already ({found['type']}) at {line}",
        "drop pin_memory=True; or let the dataset give tensors on the CPU, and move each batch",
    )


def _no_leaf(found: re.Match[str], line: str, device: str) -> _Found:
    return (
        "parameter-moved",
        f"the optimizer at {line} is given a copy of a parameter, which can't be trained",
        "move the values before they become a parameter: "
        f'nn.Parameter(values.to("{device}")), or torch.randn(…, device=…, requires_grad=True)',
    )


_REFUSALS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], str, str], _Found]], ...] = (
    (_NUMPY, _numpy),
    (_LENGTHS, _lengths),
    (_GENERATOR, _generator),
    (_FORKED, _forked),
    (_PINNED, _pinned),
    (_NO_LEAF, _no_leaf),
)
