"""Refuse Hugging Face configurations that would make transformers load code or other models.

A model is built from `config.json` alone: no weights, tokenizers or pickles of the folder are read.
But a configuration may name code in its folder (`auto_map`), another file to read instead
(`configuration_files`), kernels from the Hub that implement attention (`owner/name`), a timm
backbone at another place (`local-dir:`, `hf-hub:`), and files in the arguments for timm, which
older versions of timm unpickle.

Sources: transformers/configuration_utils.py, modeling_utils.py, integrations/hub_kernels.py,
models/timm_wrapper and timm_backbone; timm/models/_factory.py (`create_model`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

_CODE = "the code of the model is in its folder, and ckptmove never runs code of a checkpoint"
_IMPLEMENTATION = re.compile(r"[a-z0-9_]*", re.ASCII)
_IGNORED = re.compile(r"[\x00-\x20]")  # splitting a name as a URL drops some of these characters
_ELSEWHERE = re.compile(r"(hf-hub|hf_hub|local-dir):", re.IGNORECASE)

_ARGUMENTS = ("model_args", "backbone_kwargs")
_OF_FILES = ("checkpoint", "pretrained", "cache_dir")  # arguments for files start with these


def danger(said: Mapping[str, Any], known: Container[object]) -> str | None:
    """Why a model may not be made from a configuration, or None.

    Args:
        said: the content of the configuration.
        known: the model types whose code is in the library.
    """
    todo: list[tuple[str, Any]] = [("", said)]
    while todo:
        key, value = todo.pop()
        if isinstance(value, Mapping):
            if "auto_map" in value and value.get("model_type") not in known:
                return _CODE
            if key in _ARGUMENTS:
                named = next((each for each in value if each.startswith(_OF_FILES)), None)
                if named is not None:
                    return f"the configuration names a file to load, {key}: {named[:60]!r}"
            if "configuration_files" in value:
                return "the configuration refers to other files to read instead"
            todo += ((str(key), each) for key, each in value.items())
        elif isinstance(value, list):
            todo += ((key, each) for each in value)
        elif isinstance(value, str):
            if "implementation" in key and not _IMPLEMENTATION.fullmatch(value):
                return f"the configuration refers to code elsewhere, {key}: {value[:60]!r}"
            if _ELSEWHERE.match(_IGNORED.sub("", value)):
                return f"the configuration refers to a model elsewhere, {key[:40]}: {value[:60]!r}"
    return None
