"""Check the JSON of an exported program, so that reading and running it runs no other code.

torch turns the JSON into Python: it evaluates sizes and guards, writes names into the source of
`forward`, looks up operators by dotted names, and may import modules for specs of inputs. So each
text is checked by its key, at any place: torch's schema has no key with two meanings. Under an
unknown key, no text is allowed.

Sources: torch/_export/serde/schema.py and serialize.py (`GraphModuleDeserializer`);
torch/export/_unlift.py (`_convert_guards_code_to_fn`); torch/fx/graph.py (`_gen_python_code`);
torch/utils/_pytree.py (`treespec_loads`).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from ...formats.programs.script_operators import FILES, NAMESPACES
from ...formats.safetensors.header import unique
from .magnitudes import is_bounded, is_literal

_LONGEST = 1 << 14  # characters of an expression
_SHOWN = 60  # characters of a refused text in a message

#: Operators of torchvision that only compute; others write files.
_VISION = frozenset(
    ("nms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
)
#: Operators that call graphs of the program or other operators, all of which are checked too.
_HIGHER = frozenset(
    (
        *("associative_scan", "auto_functionalized", "auto_functionalized_v2", "cond"),
        *("flex_attention", "flex_attention_backward", "hints_wrapper", "invoke_subgraph"),
        *("map_impl", "out_dtype", "run_and_save_rng_state", "run_with_rng_state", "scan"),
        *("strict_mode", "tag_activation_checkpoint", "while_loop", "while_loop_stack_output"),
        *("with_effects", "wrap", "wrap_activation_checkpoint", "wrap_with_autocast"),
        *("wrap_with_set_grad_enabled",),
    )
)
_PREDISPATCH = (
    *("_add_batch_dim", "_remove_batch_dim", "_vmap_increment_nesting", "_make_dual"),
    *("_vmap_decrement_nesting", "lazy_load_decompositions", "_unpack_dual"),
    *("_jvp_increment_nesting", "_jvp_decrement_nesting", "_unwrap_for_grad"),
    *("_enter_dual_level", "_exit_dual_level"),
)
_OPERATORS = (
    *("abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "le", "lshift", "lt", "mod"),
    *("mul", "ne", "neg", "not_", "or_", "pos", "pow", "rshift", "sub", "truediv"),
)
_MATH = (
    *("acos", "asin", "atan", "ceil", "cos", "cosh", "floor", "log2", "sin", "sinh", "sqrt"),
    *("tan", "tanh", "trunc"),
)
#: Functions that are allowed in place of an operator.
_FUNCTIONS = frozenset(
    (
        *(f"_operator.{name}" for name in _OPERATORS),
        *(f"math.{name}" for name in _MATH),
        *(f"torch.sym_{name}" for name in ("int", "float", "ite", "max", "min", "not", "sqrt")),
        *("torch.sym_sum", "torch._C._set_grad_enabled"),
        *("torch.autograd.grad_mode.set_grad_enabled",),
        *("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast"),
        "torch.fx.experimental.symbolic_shapes.cast_symbool_to_symint_guardless",
        *(f"torch._functorch.predispatch.{name}" for name in _PREDISPATCH),
    )
)
_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)(?:\.([A-Za-z]\w*))?", re.ASCII)
_DUNDER = re.compile(r"__i?(and|or|xor|lshift|rshift)__")
#: Functions that an expression may call: torch and sympy print these.
_CALLED = frozenset(
    (
        *("Abs", "Add", "And", "BooleanFalse", "BooleanTrue", "CeilDiv", "CeilToInt", "CleanDiv"),
        *("Eq", "Equality", "ExprCondPair", "Float", "FloatPow", "FloatTrueDiv", "FloorDiv"),
        *("FloorToInt", "Ge", "GreaterThan", "Gt", "Identity", "Infinity", "IntInfinity"),
        *("IntTrueDiv", "Integer", "IsNonOverlappingAndDenseIndicator", "LShift", "Le"),
        *("LessThan", "Lt", "Max", "Min", "Mod", "ModularIndexing", "Mul", "Ne"),
        *("NegativeInfinity", "NegativeIntInfinity", "Not", "Or", "Piecewise", "Pow"),
        *("PowByNatural", "PythonMod", "RShift", "Rational", "RoundDecimal", "RoundToInt"),
        *("StrictGreaterThan", "StrictLessThan", "Symbol", "ToFloat", "TruncToFloat"),
        *("TruncToInt", "Tuple", "Unequality", "Where", "ceiling", "floor", "log", "sqrt"),
    )
)
#: Functions that a guard may call in addition: guards are printed as Python.
_BUILTIN = frozenset(("abs", "bool", "float", "int", "max", "min", "pow", "round", "sum"))
_OF_MATH = frozenset((*_MATH, "exp", "fabs", "inf", "log", "nan", "pow"))
_OF_TORCH = frozenset(
    ("sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sqrt")
)
_PREFIXES = ("OpaqueUnaryFn_", "BitwiseFn_")
_METHODS = frozenset(("size", "stride", "storage_offset", "dim"))
_ODD = re.compile(r"[#\\\r\n]")
_PLAIN = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Name, ast.Load),
    *(ast.Call, ast.keyword, ast.Constant, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
_OF_GUARDS = (*_PLAIN, ast.Subscript, ast.Attribute, ast.List, ast.Tuple, ast.IfExp)


def is_operator(said: str) -> bool:
    """Whether this names a torch operator or a function that only computes."""
    found = _OPERATOR.fullmatch(said)
    if found is None:
        return said in _FUNCTIONS
    space, name, overload = found.groups()
    if space == "higher_order":
        return overload is None and name in _HIGHER
    if space == "torchvision":
        return name in _VISION
    dunder = name.startswith("__") and _DUNDER.fullmatch(name) is None
    return space in NAMESPACES and name not in FILES and not dunder


def is_expression(said: str) -> bool:
    """Whether it has only numbers, symbols and known functions, and no value can be huge."""
    return _is_made_of(said, _PLAIN)


def _is_guard(said: str) -> bool:
    """Like `is_expression`, but it may also read the sizes of inputs."""
    return _is_made_of(said, _OF_GUARDS)


def _is_made_of(said: str, kinds: tuple[type[ast.AST], ...]) -> bool:
    # sympy joins lines, so a comment would end at another place.
    if len(said) > _LONGEST or not said.isascii() or _ODD.search(said):
        return False
    text = said.strip()
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    known = all(isinstance(node, kinds) and _is_harmless(node) for node in ast.walk(tree))
    return known and is_bounded(tree, text)


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return not node.id.startswith("_")
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            word = node.value.isidentifier() and "__" not in node.value
            return word or is_literal(node.value)
        return isinstance(node.value, (bool, int, float))
    if isinstance(node, ast.Attribute):
        holder = node.value.id if isinstance(node.value, ast.Name) else ""
        return node.attr in {"math": _OF_MATH, "torch": _OF_TORCH}.get(holder, _METHODS)
    if isinstance(node, ast.Call):
        made = node.func
        if isinstance(made, ast.Attribute):
            return True  # the attribute is a node of its own, which is checked above
        name = made.id if isinstance(made, ast.Name) else ""
        return name in _CALLED or name in _BUILTIN or name.startswith(_PREFIXES)
    return True


def _is_name(said: str) -> bool:
    return not said or said.isidentifier()


_DOTTED = re.compile(r"[^\"'\\\x00-\x1f\x7f]*")


def _is_dotted(said: str) -> bool:
    """Whether it can be put between quotes in code."""
    return _DOTTED.fullmatch(said) is not None


def _is_text(said: str) -> bool:
    return True


_WORD = re.compile(r"[\w./ -]*")
_OF_BUILTINS = ("dict", "float", "int", "list", "set", "str", "tuple")


def _is_tree(said: str) -> bool:
    """Whether a spec of inputs or outputs has only plain containers, and imports nothing."""
    try:
        _, root = json.loads(said, object_pairs_hook=unique)
        todo = [root]
        while todo:
            spec = todo.pop()
            kind, context = spec["type"], spec["context"]
            if isinstance(context, dict):  # of a defaultdict
                factory = context.pop("default_factory_name")
                if context.pop("default_factory_module") != "builtins":
                    return False
                if factory not in _OF_BUILTINS or not _is_data(context.pop("dict_context")):
                    return False
                if context:
                    return False
            elif isinstance(context, str) and kind != "collections.namedtuple":
                if not _is_data(json.loads(context, object_pairs_hook=unique)):
                    return False
            elif not _is_data(context):
                return False
            if not _is_data(kind):
                return False
            todo += spec["children_spec"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    return True


def _is_data(value: Any) -> bool:
    """Whether it has only words, numbers and lists."""
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, list):
            todo += each
        elif isinstance(each, dict) or (isinstance(each, str) and not _WORD.fullmatch(each)):
            return False
    return True


#: Key → the check of a text under it, and the description of a text that fails.
_RULES: dict[str, tuple[Callable[[str], bool], str]] = {
    "expr_str": (is_expression, "a size that is code, or is too large"),
    "guards_code": (_is_guard, "a guard that is code, or is too large"),
    "target": (is_operator, "an operator that is not known"),
    "as_operator": (is_operator, "an operator that is not known"),
    **dict.fromkeys(("in_spec", "out_spec"), (_is_tree, "a tree of inputs that is not known")),
    **dict.fromkeys(("name", "as_name", "forward_arg_names"), (_is_name, "code as a name")),
    **dict.fromkeys(
        (
            *("parameter_name", "buffer_name", "tensor_constant_name", "custom_obj_name"),
            *("user_input_name", "fqn"),
        ),
        (_is_dotted, "code as a name"),
    ),
    **dict.fromkeys(
        (
            *("as_string", "as_strings", "as_float", "as_floats", "as_float_lists", "real", "imag"),
            *("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "custom"),
            *("from_node", "type", "class_fqn", "torch_version", "verifiers", "dialect"),
            *("field_names", "seq_nr"),
        ),
        (_is_text, ""),
    ),
}
#: Keys of objects that are not plain data.
_OBJECTS = ("as_custom_obj", "custom_obj")


def unknown(root: Any) -> str | None:
    """Describe a part of a program that might run other code; None if it only computes.

    Args:
        root: the parsed JSON of the program.
    """
    todo: list[tuple[str, Any]] = [("", root)]
    while todo:
        key, value = todo.pop()
        if isinstance(value, dict):
            if any(each in value for each in _OBJECTS):
                return "a custom object"
            todo += value.items()
        elif isinstance(value, list):
            todo += ((key, each) for each in value)
        elif isinstance(value, str):
            rule = _RULES.get(key)
            if rule is None:
                return f"something that is not known, {key[:_SHOWN]!r}"
            accepts, otherwise = rule
            if not accepts(value):
                return f"{otherwise}: {value[:_SHOWN]!r}"
    return None
