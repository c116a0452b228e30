"""Programs of torch.export that make torch run code: every way its loader offers.

The code is harmless: it leaves an empty file behind.
"""

from __future__ import annotations

import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Records = dict[str, bytes]
Edit = Callable[[Records, Path], None]
MODEL, CONSTANTS = "models/model.json", "data/constants/model_constants_config.json"
WEIGHTS = "data/weights/model_weights_config.json"


class Canary:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.fspath(self.path),)


class Sized(torch.nn.Module):
    """Takes any number of rows, and a name."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(4))
        self.constant = torch.ones(4)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0] * 2, -1) * 2 + scale + (self.shift + self.constant).sum()


def exported(path: Path) -> Path:
    sizes = {"x": {0: torch.export.Dim("batch", min=2)}, "scale": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            Sized(), (torch.ones(3, 4),), {"scale": torch.ones(())}, dynamic_shapes=sizes
        )
        torch.export.save(program, path)
    return path


def edited(source: Path, path: Path, edit: Edit, canary: Path) -> Path:
    """A copy of a program with edited records; their names are relative to its folder."""
    with zipfile.ZipFile(source) as file:
        prefix = file.namelist()[0].partition("/")[0] + "/"
        records = {name.removeprefix(prefix): file.read(name) for name in file.namelist()}
    edit(records, canary)
    with zipfile.ZipFile(path, "w") as file:
        for name, content in records.items():
            file.writestr(name.removeprefix("/") if name[0] == "/" else prefix + name, content)
    return path


def _json(records: Records, name: str, change: Callable[[Any], object]) -> None:
    root = json.loads(records[name])
    change(root)
    records[name] = json.dumps(root).encode()


def _graph(change: Callable[[Any], object]) -> Edit:
    def edit(records: Records, canary: Path) -> None:
        _json(records, MODEL, lambda root: change(root["graph_module"]))

    return edit


def _said(canary: Path) -> str:
    return f"__import__('os').mkdir({os.fspath(canary)!r})"


# -- pickles ---------------------------------------------------------------------------------------


def constant(path_name: str, record: str | None = None, config: str = CONSTANTS) -> Edit:
    def edit(records: Records, canary: Path) -> None:
        payload = {"path_name": path_name, "is_param": False, "use_pickle": True}
        folder = config.rpartition("/")[0]
        _json(
            records, config, lambda root: root["config"].update(it={**payload, "tensor_meta": None})
        )
        records[record or f"{folder}/{path_name}"] = pickle.dumps(Canary(canary))

    return edit


def _aotinductor(records: Records, canary: Path) -> None:
    records["data/aotinductor/model/it.so"] = b"\x7fELF"


def _record(name: str) -> Edit:
    def edit(records: Records, canary: Path) -> None:
        records[name] = pickle.dumps(Canary(canary))

    return edit


# -- code in its JSON ------------------------------------------------------------------------------


def _expression(records: Records, canary: Path) -> None:
    expression_at("size", f"{_said(canary)} or 2")(records, canary)


def _guard(records: Records, canary: Path) -> None:
    expression_at("guard", f"({_said(canary)} or True)")(records, canary)


def _guard_text(records: Records, canary: Path) -> None:
    """torch puts the text of a guard between quotes, to show it when the guard fails."""
    said = _said(canary).replace("'", '"')
    guard = f"""True if True else L['a", {said}, "']"""
    _json(records, MODEL, lambda root: root.update(guards_code=[guard]))


def expression_at(where: str, said: str) -> Edit:
    """Put an expression into every size, or into the one guard."""

    def edit(records: Records, canary: Path) -> None:
        def change(node: dict[str, Any]) -> dict[str, Any]:
            return {**node, "expr_str": said} if "expr_str" in node else node

        if where == "guard":
            _json(records, MODEL, lambda root: root.update(guards_code=[said]))
        else:
            records[MODEL] = json.dumps(json.loads(records[MODEL], object_hook=change)).encode()

    return edit


def _operator(target: str) -> Edit:
    def edit(records: Records, canary: Path) -> None:
        def change(module: Any) -> None:
            graph = module["graph"]
            argument = {"name": "", "arg": {"as_string": os.fspath(canary)}, "kind": 1}
            # The verifier of graphs would find it later; operators of its own kind it lets pass.
            node = {"target": target, "inputs": [argument], "outputs": [], "metadata": {}}
            graph["nodes"].insert(0, {**node, "name": "it"})

        _graph(change)(records, canary)

    return edit


def _name(records: Records, canary: Path) -> None:
    """torch writes the names of inputs into the head of `forward`."""
    new = json.dumps(f"scale={_said(canary)}.it")

    def change(module: Any) -> None:
        for key in ("graph", "signature"):
            module[key] = json.loads(json.dumps(module[key]).replace('"scale"', new))

    _graph(change)(records, canary)


def _argument(records: Records, canary: Path) -> None:
    """torch writes the names of arguments too, and again into the first line of the body."""

    def change(module: Any) -> None:
        signature = module["module_call_graph"][0]["signature"]
        said = f'x, scale):\n    return {_said(canary)}\n    """#'
        signature["forward_arg_names"] = [said, "scale"]

    _graph(change)(records, canary)


def _spec(context: Any, kind: str = "collections.defaultdict") -> Edit:
    def edit(records: Records, canary: Path) -> None:
        def change(module: Any) -> None:
            leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
            spec = {"type": kind, "context": context, "children_spec": [leaf]}
            module["module_call_graph"][0]["signature"]["out_spec"] = json.dumps([1, spec])

        _graph(change)(records, canary)

    return edit


def _keyword(records: Records, canary: Path) -> None:
    """The names of keywords come from a tree of inputs, where arguments have no other."""

    def change(module: Any) -> None:
        signature = module["module_call_graph"][0]["signature"]
        signature["forward_arg_names"] = None
        said = json.dumps(json.dumps(f"scale=({_said(canary)})"))[1:-1]
        signature["in_spec"] = signature["in_spec"].replace('\\"scale\\"', said)

    _graph(change)(records, canary)


def _twice(records: Records, canary: Path) -> None:
    records[CONSTANTS] = records[CONSTANTS].replace(b"{", b'{"config": {}, ', 1)


FACTORY = {
    "default_factory_module": "acted",
    "default_factory_name": "it",
    "dict_context": ["a"],
}
#: Those that torch 2.13 runs, when it is told to unpickle no objects.
RUNNING: dict[str, Edit] = {
    "opaque object": constant("opaque_obj_0"),
    "opaque object in capitals": constant("opaque_obj_0", "data/constants/OPAQUE_OBJ_0"),
    "opaque object in another folder": constant("opaque_obj_0", "Data/Constants/opaque_obj_0"),
    "opaque object in a folder below": constant("opaque_obj_0/../0"),
    "opaque object by a path": constant("opaque_obj_", "data/constants/opaque_obj_"),
    "size": _expression,
    "guard": _guard,
    "guard's text": _guard_text,
    "name of an input": _name,
    "name of an argument": _argument,
}
#: Those that some version runs, or that torch's own checks find afterwards.
REFUSED: dict[str, Edit] = {
    **RUNNING,
    "weight that is an opaque object": constant("opaque_obj_0", config=WEIGHTS),
    "custom object": constant("custom_obj_0"),
    "weight that is pickled": constant("weight_9", config=WEIGHTS),
    "constant that is pickled": constant("tensor_9"),
    "constant of an unknown kind": constant("other_0"),
    "constant elsewhere": constant("../../tensor_0"),
    "compiled code": _aotinductor,
    "unknown record": _record("data/executorch/it.pte"),
    "another spelling": _record("Models/other.json"),
    "no JSON among the programs": _record("models/other.bin"),
    "pickle of an old layout": _record("data/constants/model.pt"),
    "record outside": _record("/version"),
    "function": _operator("torch.os.mkdir"),
    "operator that writes": _operator("torch.ops.aten.save.default"),
    "operator that maps": _operator("torch.ops.aten.from_file.default"),
    "operator of other processes": _operator("torch.ops._c10d_functional.broadcast.default"),
    "attribute of an operator": _operator("torch.ops.aten.add.__class__"),
    "getter": _operator("_operator.attrgetter"),
    "custom function": _operator(
        "torch.export.custom_ops._call_custom_autograd_function_in_pre_dispatch"
    ),
    "compiled operator": _operator("torch.ops.higher_order.aoti_call_delegate"),
    "extension": _operator("#it:it"),
    "factory of a dict": _spec(FACTORY),
    "kind of a list": _spec('{"__enum__": true, "fqn": "acted:It", "name": "a"}', "builtins.list"),
    "name of a keyword": _keyword,
    "says it twice": _twice,
}
