"""Have the `config.json` beside weights say the dtype that they are cast to."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable

from ...manifest.manifest import TensorEntry
from ...sources import place_of
from .files import Companion

CONFIGURATION = "config.json"
_LONGEST = 1 << 24  # bytes; larger files are left as they are
#: transformers writes `dtype`, and before its version 5 `torch_dtype`; models within a model too.
_SAID = re.compile(r'("(?:torch_)?dtype"\s*:\s*")(?:torch\.)?b?float\d+(?:_\w+)?"')


def main_dtype(tensors: Iterable[TensorEntry]) -> str | None:
    """The dtype of most bytes of floating-point tensors; None without any."""
    counted = Counter[str]()
    for each in tensors:
        if "float" in each.dtype:
            counted[each.dtype] += each.nbytes
    return counted.most_common(1)[0][0] if counted else None


def with_dtype(configuration: Companion, dtype: str) -> Companion:
    """A configuration that says this dtype, if it says any and can be read."""
    if configuration.nbytes > _LONGEST:
        return configuration
    before = configuration.content
    if before is None:
        with place_of(configuration.path).open() as source:
            before = source.read(0, source.nbytes)
    try:
        text = before.decode("utf-8")
        json.loads(text)
    except (ValueError, RecursionError):
        return configuration
    after = _SAID.sub(lambda found: f'{found[1]}{dtype}"', text).encode()
    if after == before:
        return configuration
    return configuration._replace(content=after, nbytes=len(after))
