"""Find the section of a part of a checkpoint by its structure; `averages` finds `ema`."""

import re
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from ...manifest.manifest import Role, Section
from ...manifest.paths import Key
from ...pickles.nodes import Call, Dict, List, Mapping, Node, Persistent, Text, Tuple
from ...pickles.opcodes.plain_tensors import PlainTensor, compact_form
from ..pickled_modules import Way, is_module
from ..values.numpy_arrays import array_of

_RNG_WORDS = re.compile(r"(^|[^a-z])(rng|random)([^a-z]|$)|rng_?states?|random_?states?")
#: Sizes in bytes of torch's CPU generator state (at::CPUGeneratorImplState), now and originally.
_CPU_GENERATOR_NBYTES = (5056, 5048)
_LONGEST_WORD = 100  # characters of a key that is examined
_SAFE_BITS = 60  # a number of at most so many bits is its own hash
#: The most siblings among which a generator state is searched.
MOST_SIBLINGS = 64  # an RNG state has few of them; more are not searched

#: Lightning keeps the score of each file that it saved (callbacks/model_checkpoint.py,
#: `best_k_models`); no parameter has a name with this suffix.
_OF_FILES = (".ckpt",)

_DICTS = ("collections.OrderedDict", "collections.defaultdict")
_SLOTS_ON_CPU = ("step", "mu_product")
_FLAGS = ("capturable", "fused")
_OF_SCHEDULERS = ("last_epoch", "_step_count", "base_lrs", "_last_lr")


def section_of(node: Mapping) -> Section | None:
    """The section that a mapping or object opens; None if it belongs to that of its parent."""
    held = _attributes(node)
    if held is not None:
        if is_optimizer(held):
            return Section.OPTIMIZER
        keys = held.keys_among(_OF_SCHEDULERS)
        if "last_epoch" in keys and len(keys) > 1:
            return Section.SCHEDULER
    if is_module_state(node) or (held is not None and is_state_dict(node)):
        return Section.MODEL
    return None


def _attributes(node: Mapping) -> Mapping | None:
    """The mapping that describes a node: the node itself, or the attributes of an object."""
    if isinstance(node, Call) and not node.pairs:
        return node.state if isinstance(node.state, Dict) else None
    return node


def is_optimizer(node: Mapping) -> bool:
    """Whether the node is an optimizer's state dict: `{"state": {…}, "param_groups": [{…}, …]}`."""
    groups = node.get("param_groups")
    return isinstance(node.get("state"), Mapping) and isinstance(groups, (List, Tuple))


def is_module_state(node: Mapping) -> bool:
    """Whether the node is a result of `Module.state_dict` (has `_metadata`), or a pickled one."""
    if not isinstance(node, Call):
        return False
    if isinstance(node.state, Mapping) and node.state.get("_metadata") is not None:
        return True
    return is_module(node)


def is_graph_data(node: Node) -> bool:
    """Whether the node is a graph to learn from, not a model: of PyG, or a dict with its parts.

    Source: torch_geometric/data/storage.py; data/in_memory_dataset.py, `save`.
    """
    if not isinstance(node, Mapping) or is_module_state(node):
        return False
    named = isinstance(node, Call) and (node.qualname or "").startswith("torch_geometric.data.")
    return named or bool(node.keys_among(("edge_index",)))


def is_state_dict(node: Mapping) -> bool:
    """Whether the node maps names only to tensors and numpy arrays.

    `_extra_state` and None are also accepted. Arrays beside the state of torch's generator, or
    below a key that names such states, belong to another generator and do not count.
    """
    if isinstance(node, Call) and node.qualname not in _DICTS:
        return False
    tensors = arrays = 0
    for key, value in node.pairs:
        if not isinstance(key, str) or key.endswith(_OF_FILES):
            return False
        if is_tensor(value):
            tensors += 1
        elif array_of(value) is not None and not _names_rng(key):
            arrays += 1
        elif value is not None and not key.endswith("_extra_state"):
            return False
    if arrays and any(is_cpu_generator_state(value) for _, value in node.pairs):
        return False
    return tensors + arrays > 0


def holds_weights(node: Mapping) -> bool:
    """Whether the node is a module's state or a state dict."""
    return is_module_state(node) or is_state_dict(node)


def is_tensor(node: Node) -> bool:
    """Whether the node rebuilds a tensor, or is a tensor's number, as in torch 0.1."""
    if type(node) is PlainTensor:
        return True
    if isinstance(node, Persistent):
        return isinstance(node.pid, str)
    return isinstance(node, Call) and "._rebuild_" in (node.qualname or "")


class Rng(Enum):
    """Whether a place in the tree may hold states of random number generators."""

    UNKNOWN = 0
    NEVER = 1  # inside the state dict of a module
    INSIDE = 2  # below a key that names them
    NEAR = 3  # beside the state of a CPU generator, or in a list beside it


def rng_within(node: Node, key: Key, children: list[Node], around: Rng) -> Rng:
    """The state of knowledge inside a container, given its key and the state around it."""
    if isinstance(node, Mapping) and is_module_state(node):
        return Rng.NEVER
    if around in (Rng.NEVER, Rng.INSIDE):
        return around
    if _names_rng(key) or (isinstance(node, Call) and node.qualname == "torch._C.Generator"):
        return Rng.INSIDE
    few = len(children) <= MOST_SIBLINGS
    if few and any(is_cpu_generator_state(child) for child in children):
        return Rng.NEAR
    return Rng.NEAR if around is Rng.NEAR and isinstance(node, (List, Tuple)) else Rng.UNKNOWN


def is_rng_state(shape: tuple[int, ...], key: Key, around: Rng) -> bool:
    """Whether bytes of this shape are the state of a random number generator."""
    if len(shape) != 1 or around is Rng.NEVER:
        return False
    return around is not Rng.UNKNOWN or shape[0] in _CPU_GENERATOR_NBYTES or _names_rng(key)


def _names_rng(key: Key) -> bool:
    if not isinstance(key, str) or len(key) > _LONGEST_WORD:
        return False
    return _RNG_WORDS.search(key.lower()) is not None


def is_cpu_generator_state(node: Node) -> bool:
    """Whether the node is a tensor with the shape of the state of torch's CPU generator."""
    plain = compact_form(node)
    if plain is not None:
        return len(plain.shape) == 1 and plain.shape[0] in _CPU_GENERATOR_NBYTES
    if not isinstance(node, Call) or node.qualname != "torch._utils._rebuild_tensor_v2":
        return False
    args = node.args.items if isinstance(node.args, Tuple) else []
    shape = args[2].items if len(args) > 2 and isinstance(args[2], Tuple) else []
    return len(shape) == 1 and shape[0] in _CPU_GENERATOR_NBYTES


def optimizer_roles(optimizer: Mapping) -> Iterator[tuple[Call, Role]]:
    """The tensors of an optimizer's state dict that torch keeps on a separate device.

    A `step` (in NAdam also `mu_product`) is a CPU scalar unless its group is `capturable` or
    `fused`; ASGD keeps its own on the parameter's device. A tensor among the hyper-parameters of a
    group is never moved. Source: torch/optim/optimizer.py,
    `_process_value_according_to_param_policy` and `_get_scalar_dtype`; torch/optim/asgd.py.
    """
    on_device: list[Node] = []
    groups = optimizer.get("param_groups")
    listed = groups.items if isinstance(groups, (List, Tuple)) else []
    for group in {id(group): group for group in listed}.values():
        if not isinstance(group, Mapping):
            continue
        parameters = group.get("params")
        if any(group.get(flag) is True for flag in _FLAGS):
            on_device += parameters.items if isinstance(parameters, (List, Tuple)) else []
        for key, value in group.pairs:
            if key != "params":
                values = value.items if isinstance(value, (List, Tuple)) else [value]
                yield from (
                    (each, Role.HYPERPARAMETER) for each in values if isinstance(each, Call)
                )
    flagged = {_identity(key) for key in on_device}
    state = optimizer.get("state")
    met: set[int] = set()
    for parameter, slots in state.pairs if isinstance(state, Mapping) else []:
        if _identity(parameter) in flagged or id(slots) in met:
            continue
        met.add(id(slots))
        if not isinstance(slots, Mapping) or len(slots.keys_among(("ax", "eta"))) == 2:
            continue
        for slot in _SLOTS_ON_CPU:
            value = slots.get(slot)
            if isinstance(value, Call):
                yield value, Role.STEP


def initial_score(node: Mapping) -> Call | None:
    """The initial score of Lightning's ModelCheckpoint, an infinity on the CPU.

    None once it has one. Once there are as many files as it keeps, it is the score of one of them,
    on its device. Source: lightning/pytorch/callbacks/model_checkpoint.py, `state_dict`,
    `_update_best_and_save`.
    """
    if len(node.pairs) > MOST_SIBLINGS or node.get("kth_best_model_path") != "":
        return None
    score = node.get("kth_value") if node.get("best_k_models") is not None else None
    return score if isinstance(score, Call) else None


def _identity(parameter: Node) -> object:
    """The identity of a parameter in an optimizer: its number, its name, or the node itself."""
    if isinstance(parameter, int) and parameter.bit_length() > _SAFE_BITS:
        return f"{parameter:x}", "number"
    return parameter if isinstance(parameter, (int, str)) else (id(parameter),)


def is_capturable(optimizer: Mapping) -> bool:
    """Whether a group of the optimizer is `capturable`, which torch can't step on a CPU."""
    groups = optimizer.get("param_groups")
    return isinstance(groups, (List, Tuple)) and any(
        isinstance(group, Mapping) and group.get("capturable") is True for group in groups.items
    )


def mesh_device_type(node: Call) -> Text | None:
    """The device type of a `DeviceMesh`, if it is a string in the pickle."""
    if not (node.qualname or "").endswith("device_mesh.DeviceMesh"):
        return None
    kind = (
        node.state.get("_device_type") or node.state.get("device_type")
        if isinstance(node.state, Dict)
        else None
    )
    return kind if isinstance(kind, Text) else None


def remote_device(node: Call) -> Call | None:
    """The device of a `_remote_device`, with which a ShardedTensor locates each shard."""
    if node.qualname != "torch.distributed.remote_device._remote_device":
        return None
    device = node.state.get("_device") if isinstance(node.state, Dict) else None
    return device if isinstance(device, Call) else None


class Context(NamedTuple):
    """What is known about a node from the path to it."""

    section: Section = Section.OTHER
    role: Role | None = None
    part_of: str | None = None
    averaged: bool = False  # below a key that names averages of weights, or in one
    rng: Rng = Rng.UNKNOWN
    in_set: bool = False
    data: bool = False  # in data that a model learns from
    state: bool = False  # directly in a state dict, where numpy arrays are weights
    model_at: int | None = None  # the depth of the model's state dict, if inside one
    weights_at: int | None = None  # the depth of the container of all weights of a model
    way: Way | None = None  # inside modules that were pickled whole


def child_context(context: Context, averaged: bool | None) -> Context:
    """The context of a child whose key says that it holds averages (True) or not (False).

    None: same.
    """
    if averaged is None:
        return context
    section = context.section
    if section in (Section.MODEL, Section.EMA):
        section = Section.EMA if averaged else Section.MODEL
    return context._replace(averaged=averaged, section=section)
