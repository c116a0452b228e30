"""Reviewed names: harmless names beyond torch's own list, each with the reason.

A review covers everything that unpickling can make a name do: a call with any arguments,
`__setstate__` or a plain BUILD, items appended or set, all with values that the file chooses; and
the effects of destroying the object. To add a name, read all of this code in the oldest and the
newest release. Classes whose code cannot be read in advance are left out: the user's own enums,
data classes and modules. So are names that call or look up their arguments (`functools.partial`,
`operator.*`), and names that read files (`zoneinfo.ZoneInfo`).
"""

from __future__ import annotations

from collections.abc import Mapping

#: BUILD sets its attributes; it has neither `__setstate__` nor properties with setters.
_ATTRIBUTES = "BUILD fills its __dict__; it has no __setstate__ and no setters"
#: Python's sources: Lib/types.py, Lib/collections/__init__.py, Modules/arraymodule.c.
_STANDARD: Mapping[str, str] = {
    "types.SimpleNamespace": _ATTRIBUTES,
    "collections.ChainMap": f"keeps the mappings that it is given; {_ATTRIBUTES}",
    "collections.UserDict": f"copies the pairs that it is given; {_ATTRIBUTES}",
    "collections.UserList": f"copies the items that it is given; {_ATTRIBUTES}",
    "array.array": "C code that copies numbers; a typecode is one of a few letters",
    "array._array_reconstructor": "C code that copies the bytes of numbers, and checks their sizes",
}
#: Other objects in modules that torch saved whole; from torch's sources.
_OF_MODULES: Mapping[str, str] = {
    "torch.nn.utils.weight_norm.WeightNorm": f"a hook with a name and a number; {_ATTRIBUTES}",
    "torch.nn.backends.thnn._get_thnn_function_backend": "since torch 1.5 it takes nothing, does "
    "nothing, and gives None; before, one object that knows functions by their names",
}
_NODE = (
    "object.__new__ makes it; Node.__setstate__ updates its __dict__ and empties a cache. What it "
    "holds, an interpolation for one, is resolved only when somebody asks for the value"
)
_CONTAINER = (
    "object.__new__ makes it; BaseContainer.__setstate__ updates its __dict__, puts Any for a "
    "missing key_type or element_type of its metadata, and makes Dict[…] or List[…] of both"
)
#: omegaconf 2.0 to 2.4: base.py, basecontainer.py, nodes.py, dictconfig.py, listconfig.py. An
#: EnumNode holds a class of the user, which is judged by its own name.
_OMEGACONF: Mapping[str, str] = {
    "omegaconf.dictconfig.DictConfig": _CONTAINER,
    "omegaconf.listconfig.ListConfig": _CONTAINER,
    "omegaconf.tupleconfig.TupleConfig": _CONTAINER,
    "omegaconf.base.ContainerMetadata": f"a data class; {_ATTRIBUTES}",
    "omegaconf.base.Metadata": f"a data class; {_ATTRIBUTES}",
    "omegaconf.base.UnionNode": _NODE,
    **{
        f"omegaconf.nodes.{kind}Node": _NODE
        for kind in (
            *("Any", "Boolean", "Bytes", "Enum", "Float", "Integer", "InterpolationResult"),
            *("Literal", "None", "Path", "String"),
        )
    },
    **{
        f"typing.{name}": "says a type; called, it makes an empty container or raises"
        for name in ("Any", "Dict", "List", "Tuple")
    },
}

_STATE = "object.__new__ makes it, without __init__ and __post_init__; " + _ATTRIBUTES
#: Classes in `training_args.bin` of Hugging Face's Trainer; transformers 4.6 to 5.23 (trainer.py,
#: training_args.py, trainer_pt_utils.py), accelerate 0.20 to 1.15 (state.py).
_TRAINING_ARGUMENTS: Mapping[str, str] = {
    "transformers.training_args.TrainingArguments": _STATE,
    "transformers.training_args_seq2seq.Seq2SeqTrainingArguments": _STATE,
    "transformers.trainer_pt_utils.AcceleratorConfig": _STATE,
    "accelerate.state.PartialState": f"{_STATE}; its __getattr__ only raises AttributeError",
}
_MEMBER = "an Enum gives the member with this value, or raises ValueError; it has no __new__"
#: transformers 4.6 to 5.23 (trainer_utils.py, training_args.py, debug_utils.py), accelerate 0.20 to
#: 1.15 (utils/dataclasses.py).
_ENUMS: Mapping[str, str] = {
    f"{module}.{name}": _MEMBER
    for module, names in {
        "transformers.trainer_utils": "EvaluationStrategy FSDPOption HPSearchBackend HubStrategy "
        "IntervalStrategy SaveStrategy SchedulerType ShardedDDPOption",
        "transformers.training_args": "OptimizerNames ParallelMode",
        "transformers.debug_utils": "DebugOption",
        "accelerate.utils.dataclasses": "ComputeEnvironment DistributedType DynamoBackend "
        "LoggerType PrecisionType RNGType",
    }.items()
    for name in names.split()
}

#: Name → why it is harmless.
REVIEWED: Mapping[str, str] = {
    **_STANDARD,
    **_OF_MODULES,
    **_OMEGACONF,
    **_TRAINING_ARGUMENTS,
    **_ENUMS,
}
#: For these, only the code that runs when pickle makes them was reviewed: NEWOBJ without arguments.
MADE_EMPTY = frozenset(
    name for name in (*_OMEGACONF, *_TRAINING_ARGUMENTS) if not name.startswith("typing.")
)
#: For these, only the code that runs when they are called with one value was reviewed; they must
#: not be changed afterwards.
ENUMS = frozenset(_ENUMS)
