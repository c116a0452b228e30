"""Find averaged weights (EMA, SWA) in a checkpoint, by evidence.

Libraries keep them beside the model's weights, in one of three ways:

- under a telling key: `state_dict_ema` of timm, `model_ema`, `ema_state_dict`, `params_ema` of
  BasicSR, `shadow_params` of torch-ema and diffusers;
- in an `AveragedModel` of torch.optim.swa_utils: names that begin with `module.`, and `n_averaged`;
- among the names of the model's own state dict: `model_ema.…` beside `model.…`, as the LitEma of
  CompVis/latent-diffusion (ldm/modules/ema.py) does, which also removes the dots from names.

Two libraries swap both when they save: see `_EXCHANGED`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from ...manifest.manifest import Section
from ...manifest.paths import Key
from ...pickles.nodes import Call, Dict, List, Mapping, Node, Tuple
from ...pickles.opcodes.pairs import keys_of
from .sections import is_tensor

_LONGEST_KEY = 1000  # characters of a key that is examined
_LONGEST_WORD = 100  # characters of a key that may name averages
_WORD = r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+"
_SURE = {"ema", "swa", "shadow", "polyak"}
_HINT = re.compile("ema|swa|shadow|polyak|averag|avg", re.IGNORECASE)
_OF_A_MODEL = {"model", "net", "network", "module", "params", "parameters", "weights", "state"}
#: Entries among averaged weights that count updates or configure the average.
BOOKKEEPING = frozenset(
    {"n_averaged", "num_updates", "decay", "initted", "step", "steps", "optimization_step"}
)
_SURE_BOOKKEEPING = {"n_averaged", "num_updates", "initted"}
_WRAPPED = "module."
#: ema-pytorch keeps the model itself here beside `ema_model`; the model has no such name elsewhere.
COPY = "online_model"
#: Keys that together identify the library → the key of the averages, and the key of other weights.
_EXCHANGED = (
    # Lightning, callbacks/weight_averaging.py: `load_from_checkpoint` loads the average.
    ({"averaging_state", "current_model_state", "state_dict"}, "state_dict", "current_model_state"),
    # MMEngine, hooks/ema_hook.py, `_swap_ema_state_dict`: the same.
    ({"ema_state_dict", "message_hub", "state_dict"}, "state_dict", "ema_state_dict"),
    # torch-ema and diffusers: the model's weights before the average replaced them.
    ({"shadow_params", "collected_params"}, "shadow_params", "collected_params"),
    ({"shadow_params", "temp_stored_params"}, "shadow_params", "temp_stored_params"),
)

_TOGETHER = frozenset[str]().union(*(together for together, _, _ in _EXCHANGED))


def speaks_of_average(key: Key) -> bool:
    """Whether a key says that averaged weights are below it."""
    if not isinstance(key, str) or len(key) > _LONGEST_WORD or not _HINT.search(key):
        return False
    words = {word.lower() for word in re.findall(_WORD, key)}
    if words & _SURE:
        return True
    averaged = any(word.startswith("averag") or word == "avg" for word in words)
    return averaged and bool(words & _OF_A_MODEL)


def averages_within(node: Node, section: Section) -> dict[Key, bool]:
    """Keys that show what is below them: True for averaged weights, False for other weights."""
    held = node.state if isinstance(node, Call) and not node.pairs else node
    if not isinstance(held, Mapping):
        return {}
    if section in (Section.MODEL, Section.EMA):
        found: dict[Key, bool] = dict.fromkeys(_average_names(held), True)
        if found and section is Section.EMA:  # the state of ema-pytorch holds the model too
            others = (str(key) for key, _ in held.pairs if isinstance(key, str))
            of_model = {key for key in others if key not in found and key not in BOOKKEEPING}
            found.update(dict.fromkeys(of_model, False))
        return found
    if section is not Section.OTHER:
        return {}
    keys = [
        key for key in keys_of(held.pairs) if isinstance(key, str) and len(key) <= _LONGEST_WORD
    ]
    hinted = _HINT.search("\0".join(keys)) is not None  # all at once, since there may be very many
    speaking = (str(key) for key in keys if hinted and speaks_of_average(key))
    told: dict[Key, bool] = dict.fromkeys(speaking, True)
    there = held.keys_among(_TOGETHER)
    for together, average, other in _EXCHANGED:
        if together <= there:
            told[average], told[other] = True, False
    return told


def are_tensors(node: Node, children: Sequence[Node]) -> bool:
    """Whether the node is a list of only tensors."""
    return isinstance(node, (List, Tuple)) and bool(children) and all(map(is_tensor, children))


def is_average(node: Mapping) -> bool:
    """Whether the node is the state of an `AveragedModel`, or a pickled one."""
    if isinstance(node, Call) and not node.pairs:
        state = node.state if isinstance(node.state, Dict) else None
        buffers = None if state is None else state.get("_buffers")
        modules = None if state is None else state.get("_modules")
        if not isinstance(buffers, Mapping) or not isinstance(modules, Mapping):
            return False
        return bool(buffers.keys_among(("n_averaged",)) and modules.keys_among(("module",)))
    keys = [key for key, _ in node.pairs]
    return "n_averaged" in keys and all(
        isinstance(key, str) and (key in BOOKKEEPING or key.startswith(_WRAPPED)) for key in keys
    )


def _average_names(node: Mapping) -> set[str]:
    """The names in a state dict that belong to averages: they repeat the names of the model."""
    keys = [
        str(key) for key in keys_of(node.pairs) if isinstance(key, str) and len(key) <= _LONGEST_KEY
    ]
    heads = {key.partition(".")[0] for key in keys if "." in key}
    averages = set(filter(speaks_of_average, heads))
    if not averages:
        return set()
    inside: dict[str, set[str]] = {}
    outside: set[str] = set()
    for key in keys:
        head, dot, rest = key.partition(".")
        if dot and head in averages:
            inside.setdefault(head, set()).add(rest)
        else:
            outside.add(key)
    found = set[str]()
    for head, names in inside.items():
        if _follow(head, names, outside) or _SURE_BOOKKEEPING & {*names, *outside}:
            found.update(f"{head}.{name}" for name in names)
    return found


def _follow(head: str, names: Collection[str], outside: Collection[str]) -> bool:
    """Whether most of these names repeat the other names, possibly below another head.

    A match needs more than a layer's own names, `weight` and `bias`, which are the same everywhere.
    """
    known = set(outside)
    for name in outside:
        other, _, rest = name.partition(".")
        if "." in rest or _words(other) == _words(head):
            known.add(rest)
    flat = {name.replace(".", "") for name in known}
    own = [name.removeprefix(_WRAPPED) for name in names if name not in BOOKKEEPING]
    same = sum(name in known or name in flat for name in own)
    return bool(own) and 2 * same >= len(own)


# -- names ------------------------------------------------------------------------------------


def model_names(names: Iterable[str], model: Collection[str], head: str = "") -> dict[str, str]:
    """Names of averages → the names of the same weights in the state dict of their model.

    Entries that only count or configure the average have no such name and are left out. Names
    without dots get them back if exactly one name in `model` fits. `head` is the prefix of the
    averages' names, if they are among those of the model.
    """
    own = [name for name in names if name not in BOOKKEEPING or name in model]
    wrapped = bool(own) and all(name.startswith(_WRAPPED) for name in own)
    found = {name: name.removeprefix(_WRAPPED) if wrapped else name for name in own}
    known = set(model)
    if not head and (known.intersection(found.values()) or any("." in each for each in own)):
        return found
    for flat in (False, True):
        named = _named_as(found.values(), known, head, flat=flat)
        if named:
            return {name: named.get(new, new) for name, new in found.items()}
    return found


def _named_as(
    names: Collection[str], model: Collection[str], head: str, *, flat: bool
) -> dict[str, str]:
    """Names → the full names in a model, or in one part of it, that they stand for.

    The part of the model that fits best, and `head`, decide. Names in `flat` form lack their dots.
    """
    parts: dict[str, dict[str, list[str]]] = {"": {}}
    for full in model:
        first, dot, rest = full.partition(".")
        for part, name in (("", full), *([(first, rest)] if dot else [])):
            slot = name.replace(".", "") if flat else name
            parts.setdefault(part, {}).setdefault(slot, []).append(full)

    def likeness(part: str) -> tuple[int, bool]:
        return sum(name in parts[part] for name in names), _words(part) == _words(head)

    best = max(parts, key=likeness)
    alike = [part for part in parts if likeness(part) == likeness(best)]
    if len(alike) > 1 and alike[0]:
        return {}
    table = parts[alike[0]]
    if alike[0] == COPY:
        return {name: name for name in names}
    return {name: table[name][0] for name in names if len(table.get(name, ())) == 1}


def _words(head: str) -> frozenset[str]:
    """The words of a name that don't refer to averages."""
    words = (word.lower() for word in re.findall(_WORD, head))
    return frozenset(word for word in words if word not in _SURE and not word.startswith("av"))
