"""Find what to change so that a condition of a program holds: a flag, a default, a `not`.

The source is parsed, never run; the frames that called a model show which variables are true.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

_MOST_STEPS = 16  # the most steps from a condition to its cause


class ProgramOption(NamedTuple):
    """An option of a command line, as the program declares it."""

    flag: str  #: `--no-cuda`
    flags: tuple[str, ...]  #: all its names, short and long
    action: str  #: `store_true`, or ""
    default: ast.expr | None
    is_number: bool  #: whether its value is the index of a device
    line: str  #: where it is declared

    @property
    def is_given(self) -> bool:
        """Whether the option was given on the command line."""
        given = sys.argv[1:]
        return any(each == f or each.startswith(f"{f}=") for each in given for f in self.flags)

    @property
    def is_boolean(self) -> bool:
        """Whether its value is True or False, and never the name of a device."""
        of = self.default.value if isinstance(self.default, ast.Constant) else None
        return self.action.startswith("store_") or isinstance(of, bool)

    @property
    def turns_off(self) -> bool:
        """Whether its name says that it turns the GPU off."""
        name = self.flag.lstrip("-").replace("_", "-")
        return self.action == "store_true" and name.startswith(
            ("no-", "disable-", "cpu", "use-cpu")
        )

    def turned(self, wanted: bool) -> str:
        """The fix that makes its value True, or False."""
        if self.action == "store_false" and self.flag.lstrip("-").startswith(("no-", "no_")):
            return f"declare {self.flag} with action='store_true' at {self.line}"
        usual = {"store_true": True, "store_false": False}.get(self.action)
        if usual is None:
            return f"give {self.flag} {wanted}, or make it the default at {self.line}"
        if usual is wanted:
            return f"give {self.flag}"
        if self.is_given:
            return f"drop {self.flag} from the command line"
        return f"drop default={usual} of {self.flag} at {self.line}"


class Conditions:
    """The conditions of a program."""

    def __init__(
        self,
        assigned: Mapping[str, ast.expr],
        truths: Mapping[str, bool],
        option: Callable[[str], ProgramOption | None],
    ) -> None:
        """Args:
        assigned: the last expression that was assigned to each variable.
        truths: variables that are True or False.
        option: returns the option behind an attribute of the parsed arguments.
        """
        self._assigned = assigned
        self._truths = truths
        self._option = option

    def fix(self, test: ast.expr, *, wanted: bool) -> str:
        """The fix that makes a condition `wanted`; "" if none is known."""
        for _ in range(_MOST_STEPS):
            if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                if wanted and _asks_for_a_device(test.operand):
                    return f"drop the `not` before {ast.unparse(test.operand)}"
                test, wanted = test.operand, not wanted
            elif isinstance(test, ast.BoolOp):
                truths = [(self.truth(each), each) for each in test.values]
                wrong = [each for truth, each in truths if truth is (not wanted)]
                maybe = [each for truth, each in truths if truth is None]
                test = (wrong or maybe or test.values)[0]
            elif isinstance(test, (ast.Name, ast.Attribute)):
                given = self._assigned.get(ast.unparse(test))
                if given is None:
                    found = self._option(test.attr) if isinstance(test, ast.Attribute) else None
                    if found is not None and wanted and found.turns_off and not found.is_given:
                        return f"write `not {ast.unparse(test)}`: {found.flag} turns the GPU off"
                    return found.turned(wanted) if found is not None and found.is_boolean else ""
                test = given
            else:
                return self._given(test) if wanted else ""
        return ""

    def _given(self, test: ast.expr) -> str:
        """The fix if a condition compares an option or environment variable with a constant."""
        if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], (ast.Eq, ast.In)):
            return ""
        value, meant = test.left, test.comparators[0]
        made = self._assigned.get(ast.unparse(value))
        of_torch = isinstance(made, ast.Call) and ast.unparse(made.func) == "torch.device"
        if of_torch and isinstance(meant, ast.Constant):
            name = ast.unparse(value)
            return f"compare {name}.type with {meant.value!r}: a torch.device is no string"
        if isinstance(meant, (ast.Tuple, ast.List, ast.Set)) and meant.elts:
            meant = meant.elts[0]
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            if value.func.attr in ("get", "getenv"):
                break
            value = value.func.value  # `.lower()`
        value = self._assigned.get(ast.unparse(value), value)
        if not isinstance(meant, ast.Constant) or isinstance(meant.value, bytes):
            return ""
        if isinstance(value, ast.Attribute):
            found = self._option(value.attr)
            return "" if found is None else f"give {found.flag} {meant.value}"
        name = variable_of_environment(value)
        return f"set {name}={meant.value}" if name else ""

    def truth(self, test: ast.expr) -> bool | None:
        """Whether a condition holds; None if that is not known."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.truth(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            parts = {self.truth(each) for each in test.values}
            settles = isinstance(test.op, ast.Or)  # one such part decides
            return settles if settles in parts else None if None in parts else not settles
        if _asks_for_a_device(test):
            return True
        if isinstance(test, ast.Constant):
            return bool(test.value)
        return self._truths.get(ast.unparse(test))


def variable_of_environment(value: ast.expr) -> str:
    """The name that `os.environ.get("DEVICE")` or `os.getenv("DEVICE")` reads; else ""."""
    if not isinstance(value, ast.Call) or not value.args:
        return ""
    reads = ast.unparse(value.func).endswith(("environ.get", "getenv"))
    name = value.args[0]
    return str(name.value) if reads and isinstance(name, ast.Constant) else ""


def _asks_for_a_device(test: ast.expr) -> bool:
    return isinstance(test, ast.Call) and ast.unparse(test.func).endswith("is_available")
