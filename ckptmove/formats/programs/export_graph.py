"""Find and rewrite the devices in the JSON of an exported program.

A device is an object `{"type": "cuda", "index": 0}`, in the metadata of a tensor or as an argument
of a node; in an autocast region it is a device type, as a string. Anything outside the schema below
can be shown, but prevents relocation. So do other strings that spell a device, such as arguments of
custom operators, because their meaning is unknown. Stack traces and other texts for people are not
changed.

Source: torch/_export/serde/schema.py, version 8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ...manifest.paths import Path, spell
from ...pickles.device_tags import names_device
from ..archives.documents import Json

_MAJOR = 8

#: Class → field → type of the value: a class, or a list `[…]` or mapping `{…}` of it; or `data`,
#: which holds no devices; `words`, which may spell a device; `riddle`, whose meaning is not in the
#: file.
_CLASSES: dict[str, dict[str, str]] = {
    "ExportedProgram": {
        "graph_module": "GraphModule",
        **dict.fromkeys(("opset_version", "range_constraints", "schema_version"), "data"),
        **dict.fromkeys(("verifiers", "torch_version"), "data"),
        "guards_code": "words",
    },
    "GraphModule": {
        "graph": "Graph",
        "signature": "GraphSignature",
        "module_call_graph": "[ModuleCallEntry]",
        **dict.fromkeys(("metadata", "treespec_namedtuple_fields"), "data"),
    },
    "Graph": {
        "inputs": "[Argument]",
        "outputs": "[Argument]",
        "nodes": "[Node]",
        "tensor_values": "{TensorMeta}",
        **dict.fromkeys(("sym_int_values", "sym_bool_values", "sym_float_values"), "data"),
        **dict.fromkeys(("is_single_tensor_return", "custom_obj_values"), "data"),
    },
    "Node": {
        "inputs": "[NamedArgument]",
        "outputs": "[Argument]",
        **dict.fromkeys(("target", "metadata", "is_hop_single_tensor_return", "name"), "data"),
    },
    "NamedArgument": {"arg": "Input", "name": "data", "kind": "data"},
    "TensorMeta": {
        "device": "Device",
        **dict.fromkeys(("dtype", "sizes", "requires_grad", "strides"), "data"),
        **dict.fromkeys(("storage_offset", "layout"), "data"),
    },
    "GraphArgument": {"name": "data", "graph": "Graph"},
    "GraphSignature": {"input_specs": "[InputSpec]", "output_specs": "[OutputSpec]"},
    "ModuleCallEntry": {"fqn": "data", "signature": "ModuleCallSignature"},
    "ModuleCallSignature": {
        "inputs": "[Argument]",
        "outputs": "[Argument]",
        **dict.fromkeys(("in_spec", "out_spec", "forward_arg_names"), "data"),
    },
    "UserInputSpec": {"arg": "Argument"},
    "UserOutputSpec": {"arg": "Argument"},
    "InputToConstantInputSpec": {"name": "data", "value": "ConstantValue"},
}
_ARGUMENT = {
    **dict.fromkeys(("as_none", "as_int", "as_float", "as_bool", "as_complex"), "data"),
    **dict.fromkeys(("as_ints", "as_floats", "as_bools", "as_int_lists"), "data"),
    **dict.fromkeys(("as_float_lists", "as_tensor", "as_tensors", "as_optional_tensor"), "data"),
    **dict.fromkeys(("as_optional_tensors", "as_nested_tensors", "as_operator"), "data"),
    **dict.fromkeys(("as_sym_int", "as_sym_ints", "as_sym_float", "as_sym_floats"), "data"),
    **dict.fromkeys(("as_sym_bool", "as_sym_bools", "as_scalar_type"), "data"),
    **dict.fromkeys(("as_memory_format", "as_layout"), "data"),
    "as_string": "words",
    "as_strings": "words",
    "as_graph": "GraphArgument",
    "as_custom_obj": "riddle",
}
#: Like `_CLASSES`, for objects that hold exactly one of these fields.
_UNIONS: dict[str, dict[str, str]] = {
    "Argument": {**_ARGUMENT, "as_device": "riddle", "as_string_to_argument": "{Argument}"},
    "Input": {**_ARGUMENT, "as_device": "Device", "as_string_to_argument": "{Input}"},
    "ConstantValue": {
        **dict.fromkeys(("as_none", "as_int", "as_float", "as_bool"), "data"),
        "as_string": "words",
    },
    "InputSpec": {
        "user_input": "UserInputSpec",
        "constant_input": "InputToConstantInputSpec",
        **dict.fromkeys(("parameter", "buffer", "tensor_constant", "token"), "data"),
        "custom_obj": "riddle",
    },
    "OutputSpec": {
        "user_output": "UserOutputSpec",
        **dict.fromkeys(("loss_output", "buffer_mutation", "gradient_to_parameter"), "data"),
        **dict.fromkeys(("gradient_to_user_input", "user_input_mutation", "token"), "data"),
        "parameter_mutation": "data",
    },
}

_AUTOCAST = "torch.ops.higher_order.wrap_with_autocast"
_COMPILED = "torch.ops.higher_order.triton_kernel_wrapper"
#: Operators that exist for only one type of device; an export on another device would use others.
_BOUND = re.compile(
    r"_for_(cpu|mps)|cudnn|miopen|mkldnn|onednn|nnpack|_mkl|_cuda|_mps|_xpu|_hpu"
    r"|_(flash|efficient)_attention|_thnn_fused|qlinear|qconv|_triton"
)
_QUOTED = re.compile(r"""['"]([a-z]+(?::[0-9]+)?)['"]""")


class DeviceMention(NamedTuple):
    """A place that names a device."""

    path: Path
    holder: dict[str, Json]  #: the object that names the device, as in the document
    device: str
    kind: str = "graph"  #: `graph`, or `autocast` if it is only a device type
    fixed: str = ""  #: why the device type can't change, or empty

    def with_device(self, device: str) -> dict[str, Json]:
        """The changed members of the holder."""
        return {"as_string": device} if self.kind == "autocast" else device_members(device)


class ProgramDevices(NamedTuple):
    """The devices in a program, and the obstacles to changing them."""

    places: list[DeviceMention]  #: the places that name a device, in order
    obstacles: list[str]  #: why it can't be relocated, one clause each
    bound: list[str]  #: operators that exist for only one type of device


def device_text(node: Json) -> str | None:
    """The tag for `{"type": …, "index": …}`; None if the object is not a device."""
    if not isinstance(node, dict) or not node.keys() <= {"type", "index"}:
        return None
    kind, index = node.get("type"), node.get("index")
    if not isinstance(kind, str) or isinstance(index, bool):
        return None
    if index is None or (kind in ("cpu", "mps", "meta") and index in (0, -1)):
        return kind
    return f"{kind}:{index}" if isinstance(index, int) and index >= 0 else None


def device_members(tag: str) -> dict[str, Json]:
    """The members of a device object for a tag."""
    kind, _, index = tag.partition(":")
    if kind == "mps":
        return {"type": kind, "index": 0}  # torch.device("mps").index of every tensor there
    return {"type": kind, "index": int(index) if index else None}


def walk(root: Json, path: Path) -> ProgramDevices:
    """Find every device in the JSON of a program; their paths start with `path`."""
    program = ProgramDevices([], [], [])
    walker = _Walker(program)
    walker.run(root, path)
    version = root.get("schema_version") if isinstance(root, dict) else None
    major = version.get("major") if isinstance(version, dict) else None
    if major != _MAJOR:
        program.obstacles.append(f"its schema version is not {_MAJOR} but {major!r}")
    return program


class _Walker:
    def __init__(self, program: ProgramDevices) -> None:
        self.program = program
        self.todo: list[tuple[Json, str, Path]] = []

    def run(self, root: Json, path: Path) -> None:
        self.todo.append((root, "ExportedProgram", path))
        while self.todo:
            node, kind, at = self.todo.pop()
            if node is not None:
                self.todo += reversed(list(self.visit(node, kind, at)))

    def riddle(self, at: Path, what: str) -> Iterator[tuple[Json, str, Path]]:
        self.program.obstacles.append(f"it holds {what} at {spell(at)!r}")
        return iter(())

    def visit(self, node: Json, kind: str, at: Path) -> Iterator[tuple[Json, str, Path]]:
        if kind == "data":
            return iter(())
        if kind == "words":
            return self.words(node, at)
        if kind == "riddle":
            return self.riddle(at, "something unknown")
        if kind == "Device":
            return self.device(node, at)
        if kind[0] == "[" and isinstance(node, list):
            return ((each, kind[1:-1], (*at, n)) for n, each in enumerate(node))
        if kind[0] == "{" and isinstance(node, dict):
            return ((each, kind[1:-1], (*at, key)) for key, each in node.items())
        fields = _UNIONS.get(kind) or _CLASSES.get(kind)
        if fields is None or not isinstance(node, dict):
            return self.riddle(at, f"no proper {kind}")
        if node.keys() - fields.keys() or (kind in _UNIONS and len(node) != 1):
            return self.riddle(at, f"a {kind} that is not known")
        return self.node(node, at) if kind == "Node" else self.members(node, fields, at)

    def members(
        self, node: dict[str, Json], fields: dict[str, str], at: Path
    ) -> Iterator[tuple[Json, str, Path]]:
        for key, each in node.items():
            quiet = key in ("graph_module", "arg", "nodes") or key.startswith("as_")
            yield each, fields[key], at if quiet else (*at, key)

    def node(self, node: dict[str, Json], at: Path) -> Iterator[tuple[Json, str, Path]]:
        """Visit a call of an operator; its arguments are identified by name."""
        target, inputs = node.get("target"), node.get("inputs")
        here = (*at[:-1], node.get("name") or at[-1])
        if not isinstance(target, str) or not isinstance(inputs, list):
            yield from self.riddle(here, "no proper Node")
            return
        if target.startswith(_COMPILED):
            yield from self.riddle(here, "a Triton kernel")
        if _BOUND.search(target):
            self.program.bound.append(target)
        for n, each in enumerate(inputs):
            name = each.get("name") if isinstance(each, dict) else None
            if n == 0 and target == _AUTOCAST and self.autocast(inputs, (*here, 0)):
                continue
            yield each, "NamedArgument", (*here, name if isinstance(name, str) and name else n)
        yield node.get("outputs"), "[Argument]", (*here, "outputs")

    def autocast(self, inputs: list[Json], at: Path) -> bool:
        """Record the device type of an autocast region.

        False if it does not give one as expected.
        """
        first, second = (_argument(inputs, n) for n in (0, 1))
        if first is None or second is None or first.keys() != {"as_string"}:
            return False
        kind = first["as_string"]
        if not isinstance(kind, str) or not kind.isidentifier():
            return False
        fixed = "" if "as_scalar_type" in second else "it has no dtype, so the device decides it"
        self.program.places.append(DeviceMention(at, first, kind, "autocast", fixed))
        return True

    def device(self, node: Json, at: Path) -> Iterator[tuple[Json, str, Path]]:
        device = device_text(node)
        if device is None:
            return self.riddle(at, "no proper device")
        self.program.places.append(DeviceMention(at, node, device))
        return iter(())

    def words(self, node: Json, at: Path) -> Iterator[tuple[Json, str, Path]]:
        texts = node if isinstance(node, list) else [node]
        for text in texts:
            if not isinstance(text, str):
                return self.riddle(at, "no proper text")
            if names_device(text) or any(map(names_device, _QUOTED.findall(text))):
                return self.riddle(at, f"the text {text[:40]!r}, which may mean a device,")
        return iter(())


def _argument(inputs: list[Json], n: int) -> dict[str, Json] | None:
    """The n-th argument of a node, if it is a union."""
    named = inputs[n] if n < len(inputs) else None
    found = named.get("arg") if isinstance(named, dict) else None
    return found if isinstance(found, dict) and len(found) == 1 else None
