"""Find what chose a device in the source: an option, the environment, or a condition.

The source is parsed, never run.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from ....manifest.device import kind_of
from .conditions import Conditions, ProgramOption, variable_of_environment
from .settings import Settings, device_named_by, string_of
from .source_lines import CALLED, line_in
from .syntax import code_at, tree_of

_MOST_SOURCES = 4  # the most variables that a value is followed through
_Around = TypeVar("_Around", bound=ast.stmt)
_PLACES = (ast.Name, ast.Attribute, ast.Subscript)


class Choice(NamedTuple):
    """Why a device differs from the requested one."""

    title: str  #: the code that chose it, and its line
    fix: str  #: the change of code or options
    evidence: tuple[str, ...]  #: the origins of its parts, one line each


class ProgramSource(Settings):
    """The source of a program."""

    def __init__(
        self, tree: ast.Module, file: str, wanted: str, truths: Mapping[str, bool]
    ) -> None:
        super().__init__(tree, file, wanted)
        given = {ast.unparse(target): value for target, value in self._assignments()}
        self._conditions = Conditions(given, truths, self._option)

    def assigned(
        self, values: Mapping[str, str], is_on: str, used: Iterable[str] = ()
    ) -> Choice | None:
        """A variable that got the wrong device: one of `used`, or one that is passed to a call."""
        used, values = set(used) or self._moved_to(), dict(values)
        for target, value in [*self._assignments()][::-1]:  # `self.device = device`
            name, other = ast.unparse(target), ast.unparse(value)
            if name in used and name in values and isinstance(value, (ast.Name, ast.Attribute)):
                used.add(other)
                values[other] = values[name]
        found: Choice | None = None  # the last one of several assignments
        for target, value in self._assignments():
            name = ast.unparse(target)
            if name not in used or kind_of(values.get(name, "")) != kind_of(is_on):
                continue
            if isinstance(value, (ast.Name, ast.Attribute)) and ast.unparse(value) in values:
                continue  # another name of a known variable
            if device_named_by(value) not in ("", kind_of(is_on)):
                continue  # this assignment is in another branch
            told = list(
                dict.fromkeys([*self._sources(value), *self._settings(value, kind_of(is_on))])
            )
            title = f"{name} is {values[name]}: {name} = {self.code(value)} at {self.at(value)}"
            found = Choice(title, self._fix(value, told), tuple(line for line, _ in told))
            around = self._condition(value)
            if around is not None and device_named_by(value):
                found = self._of_branch(title, value, around)
        if found is not None:
            return found
        for name in sorted(used & {each for each in values if "." in each or "[" in each}):
            if kind_of(values[name]) != kind_of(is_on):
                continue
            key = name.rpartition("[")[2].strip("]'\"") if "[" in name else name.rpartition(".")[2]
            argument = self._argument(key) or self._setting(key, kind_of(is_on))
            if argument:
                return Choice(f"{name} is {values[name]}: {argument[0]}", argument[1], ())
        for name in sorted(used & set(values)):
            given = self._given(name.rpartition(".")[2], kind_of(is_on))
            if given is not None and kind_of(values[name]) == kind_of(is_on):
                title = f"{name} is {values[name]}: {self.code(given)} at {self.at(given)}"
                return Choice(title, f'give "{self._wanted}" there', ())
        return None

    def device_at(self, number: int, kind: str, refused: Mapping[str, str]) -> Choice | None:
        """Why a line makes a `torch.device` of this kind; None if it is not known.

        `refused` maps lines where making a device, or a move, failed to the exception.
        """
        calls = [
            each
            for each in self._nodes
            if isinstance(each, ast.Call)
            and each.lineno <= number <= (each.end_lineno or 0)
            and ast.unparse(each.func).rpartition(".")[2] == "device"
        ]
        if not calls:
            return None
        hidden = self.hidden()
        if hidden is not None:
            return hidden
        value = calls[0]
        title = f"{self.code(value)} at {self.at(value)} is {kind}"
        handler = self._around(value, ast.Try)
        if handler is not None and not _is_in(value, handler.body):
            inside = range(handler.body[0].lineno, (handler.body[-1].end_lineno or 0) + 1)
            for line, error in refused.items():
                first = line.partition(CALLED)[0]
                if first in {line_in(self._file, each) for each in inside}:
                    lines = (
                        f"`{code_at(first)}` at {first} raised {error}, and the `except` went on",
                    )
                    return Choice(title, f"mend `{code_at(first)}` at {first}", lines)
        around = self._condition(value) if device_named_by(value) else None
        if around is not None:
            return self._of_branch(title, value, around)
        passed = self._passed_before(value) if device_named_by(value) == kind else None
        if passed is not None:
            line = f"`if {self.code(passed.test)}` at {self.at(passed)} does not hold"
            return self._of_test(title, line, passed.test, wanted=True)
        told = list(dict.fromkeys([*self._sources(value), *self._settings(value, kind)]))
        return Choice(title, self._fix(value, told), tuple(line for line, _ in told))

    def _of_branch(self, title: str, value: ast.expr, around: ast.If) -> Choice:
        """A branch of an `if` chose the device, but the other branch should have run."""
        line = f"it is chosen by `if {self.code(around.test)}` at {self.at(around)}"
        return self._of_test(title, line, around.test, wanted=not _is_in(value, around.body))

    def _of_test(self, title: str, line: str, test: ast.expr, *, wanted: bool) -> Choice:
        """A condition chose the device, and should be `wanted`."""
        told = list(dict.fromkeys(self._sources(test)))
        fix = self._fix(test, told, wanted=wanted)
        return Choice(title, fix, (line, *(each for each, _ in told)))

    def _passed_before(self, value: ast.expr) -> ast.If | None:
        """The last `if` before `value` in its function that names a device of another kind."""
        function = self._around(value, ast.FunctionDef)
        kind = device_named_by(value)
        for each in () if function is None else reversed(function.body):
            if isinstance(each, ast.If) and each.lineno < value.lineno:
                named = {
                    device_named_by(n)
                    for part in each.body
                    for n in ast.walk(part)
                    if isinstance(n, ast.expr)
                }
                if named - {"", kind}:
                    return each
        return None

    def guarded(self, model: str) -> Choice | None:
        """A move of the model under a condition that did not hold."""
        for each in self._nodes:
            if not isinstance(each, ast.If):
                continue
            for call in (c for part in each.body for c in ast.walk(part)):
                if not isinstance(call, ast.Call) or _moved(call) != (model or "model"):
                    continue
                told = list(dict.fromkeys(self._sources(each.test)))
                test = self.code(each.test)
                title = (
                    f"{self.code(call)} at {self.at(call)} is not run: "
                    f"`if {test}` at {self.at(each)} does not hold"
                )
                fix = self._fix(each.test, told, wanted=True)
                return Choice(title, fix, tuple(line for line, _ in told))
        return None

    def hidden(self) -> Choice | None:
        """`os.environ["CUDA_VISIBLE_DEVICES"] = ""`, which hides all GPUs."""
        for target, value in self._assignments():
            name = ast.unparse(target)
            hides = isinstance(value, ast.Constant) and value.value in ("", "-1")
            if hides and "CUDA_VISIBLE_DEVICES" in name:
                line = f"{self.code(target)} = {self.code(value)} at {self.at(value)}"
                return Choice(f"{line} hides all GPUs", 'drop it, or write "0" there', ())
        return None

    def uncalled(self, model: str) -> Choice | None:
        """`model.cuda` without a call, which moves nothing."""
        for each in self._nodes:
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Attribute):
                code = self.code(each.value)
                if code in (f"{model}.cuda", f"{model}.to"):
                    return Choice(f"{code} at {self.at(each)} is not called", f"{code}()", ())
        return None

    def settled(self, model: str, kind: str) -> Choice | None:
        """A setting that moves a model in the line that makes it: `….to(config.device)`."""
        for target, value in self._assignments():
            if ast.unparse(target) != model or not isinstance(value, ast.Call) or not value.args:
                continue
            place = value.args[0]
            if _moved(value) and isinstance(place, (ast.Attribute, ast.Subscript)):
                key = place.attr if isinstance(place, ast.Attribute) else string_of(place.slice)
                told = self._argument(key) or self._setting(key, kind)
                if told is not None:
                    title = f"{self.code(place)} is {kind}: {told[0]}"
                    return Choice(title, told[1], (self.made(model),))
        return None

    def made(self, model: str) -> str:
        """The last line that made a model; "" if there is none."""
        found = ""
        for target, value in self._assignments():
            if ast.unparse(target) == model and isinstance(value, ast.Call):
                found = f"{model} = {self.code(value)} at {self.at(value)}"
        return found

    def _condition(self, value: ast.expr) -> ast.If | None:
        """The innermost `if` around an expression, or None."""
        return self._around(value, ast.If)

    def _around(self, value: ast.expr, kind: type[_Around]) -> _Around | None:
        """The innermost statement of a kind around an expression, or None."""
        found: _Around | None = None
        for each in self._nodes:  # outer ones come first
            if isinstance(each, kind) and any(value is node for node in ast.walk(each)):
                found = each
        return found

    # -- parts of the source -----------------------------------------------------------------------

    def _moved_to(self) -> set[str]:
        """The variables that calls are given, such as `device` in `.to(device)`."""
        found = set()
        for each in self._nodes:
            if isinstance(each, ast.Call):
                given = [*each.args, *(key.value for key in each.keywords)]
                found |= {ast.unparse(g) for g in given if isinstance(g, _PLACES)}
        return found

    def _sources(self, value: ast.expr) -> Iterator[tuple[str, str]]:
        """The origins of the parts of an expression, each with its fix or ""."""
        todo, known = [value], set[str]()
        while todo and len(known) < _MOST_SOURCES:
            for each in ast.walk(todo.pop(0)):
                found: tuple[str, str] | None = None
                if isinstance(each, ast.Attribute):
                    found = self._argument(each.attr)
                elif isinstance(each, ast.Call):
                    found = self._environment(each)
                if isinstance(each, (ast.Name, ast.Attribute)):
                    name = ast.unparse(each)
                    for target, given in self._assignments() if name not in known else ():
                        plain = isinstance(given, ast.Call) and "parse" in ast.unparse(given.func)
                        if ast.unparse(target) == name and given is not value and not plain:
                            known.add(name)
                            yield f"{name} = {self.code(given)} at {self.at(given)}", ""
                            todo.append(given)
                if found is not None:
                    yield found

    def _option(self, name: str) -> ProgramOption | None:
        """The command-line option behind `args.NAME`, or None."""
        for each in self._nodes:
            if not isinstance(each, ast.Call) or not ast.unparse(each.func).endswith(
                ("add_argument", "click.option")
            ):
                continue
            flags = tuple(text for arg in each.args if (text := string_of(arg)))
            given = {key.arg: key.value for key in each.keywords}
            named = {flag.lstrip("-").replace("-", "_") for flag in flags}
            if "dest" in given:
                named = {string_of(given["dest"])}
            if name in named:
                action = string_of(given["action"]) if "action" in given else ""
                flag = max(flags, key=len)
                number = "type" in given and ast.unparse(given["type"]) == "int"
                return ProgramOption(
                    flag, flags, action, given.get("default"), number, self.at(each)
                )
        return None

    def _argument(self, name: str) -> tuple[str, str] | None:
        """The text about the command-line option behind `args.NAME`, and its fix; or None."""
        found = self._option(name)
        if found is None:
            return None
        flag = found.flag
        if found.action.startswith("store_"):
            return f"{flag} is a flag (action={found.action!r}) at {found.line}", ""
        default = "None" if found.default is None else self.code(found.default)
        told = f"{flag} is {default} by default at {found.line}"
        if found.is_boolean:
            return told, ""
        wanted = (self._wanted.partition(":")[2] or "0") if found.is_number else self._wanted
        if kind_of(string_of(found.default or ast.Constant(None))) == kind_of(self._wanted):
            return told, ""  # the option is not the cause
        if found.is_given:
            return f"{flag} was given on the command line", f"give {flag} {wanted}"
        return told, f"give {flag} {wanted}, or make it the default"

    def _environment(self, call: ast.Call) -> tuple[str, str] | None:
        """The text about an environment variable that a call reads, and its fix; or None."""
        name = variable_of_environment(call)
        if not name:
            return None
        default = self.code(call.args[1]) if len(call.args) > 1 else "None"
        told = f"the environment has no {name}, and {default} stands for it, at {self.at(call)}"
        if name in os.environ:
            told = f"{name} is {os.environ[name]!r} in the environment, read at {self.at(call)}"
        return told, f"set {name}={self._wanted}, or make it the default"

    def _condition_within(self, value: ast.expr) -> ast.expr | None:
        """The first condition in the program's function that a value calls, or None."""
        name = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        of = (e for e in self._nodes if isinstance(e, ast.FunctionDef) and e.name == name)
        tests = (n.test for e in of for n in ast.walk(e) if isinstance(n, (ast.If, ast.IfExp)))
        return next(tests, None)

    def _default_of(self, value: ast.expr) -> ast.expr | None:
        """The value that names a device, and is assigned to a name or is its default; or None."""
        found = (
            given
            for target, given in self._assignments()
            if ast.unparse(target) == ast.unparse(value) and device_named_by(given)
        )
        return next(found, None) if isinstance(value, ast.Name) else None

    def _fix(
        self, value: ast.expr, told: Iterable[tuple[str, str]], *, wanted: bool | None = None
    ) -> str:
        """The fix; `wanted` is what a condition should be."""
        choice = next((each for each in ast.walk(value) if isinstance(each, ast.IfExp)), None)
        test = value
        if choice is not None and wanted is None and self._conditions.truth(choice.test):
            given = self._default_of(choice.body)
            if given is not None:
                name, line = ast.unparse(choice.body), self.at(given)
                give = f'give {name}="{self._wanted}" in the call'
                return f"{give}; it is the CPU by default at {line}"
        if choice is not None and wanted is None:
            test, wanted = choice.test, device_named_by(choice.body) != "cpu"
        fix = "" if wanted is None else self._conditions.fix(test, wanted=wanted)
        fix = fix or next((fix for _, fix in told if fix), "")
        if fix:
            return fix
        if choice is not None:
            one, other = device_named_by(choice.body), _device_within(choice.orelse)
            if one == "cpu" and other and other != "cpu":
                first, last = choice.body, choice.orelse
                nested = isinstance(last, ast.IfExp)
                one, other = self.code(first), f'"{other}"' if nested else self.code(last)
                return f"swap the two: {other} if {self.code(choice.test)} else {one}"
            return f"mend the condition `{self.code(choice.test)}`, which does not hold"
        inner = self._condition_within(value)
        if inner is not None:
            return (
                f"mend the condition `{self.code(inner)}` at {self.at(inner)}, which does not hold"
            )
        if wanted is not None:
            holds = "does not hold" if wanted else "holds"
            return f"mend the condition `{self.code(test)}`, which {holds}"
        computed = isinstance(value, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Name, ast.Call))
        if computed and not device_named_by(value):
            return f"mend `{self.code(value)}`, which does not give what it should"
        return f'write "{self._wanted}" there'


def source_of(file: str, wanted: str, truths: Mapping[str, bool]) -> ProgramSource | None:
    """The source of a file; None if it has no source, or can't be parsed."""
    tree = tree_of(file) if file else None
    return None if tree is None else ProgramSource(tree, file, wanted, truths)


def _device_within(value: ast.expr) -> str:
    """The kind of device that an expression may give; of several, the first that is no CPU."""
    while isinstance(value, ast.IfExp):
        first = device_named_by(value.body)
        value = value.body if first not in ("", "cpu") else value.orelse
    return device_named_by(value)


def _is_in(value: ast.expr, body: Iterable[ast.stmt]) -> bool:
    """Whether an expression is inside one of these statements."""
    return any(value is each for part in body for each in ast.walk(part))


def _moved(call: ast.Call) -> str:
    """The code of the object that a call of `.to` or `.cuda` moves; else ""."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("to", "cuda"):
        return ""
    return ast.unparse(call.func.value)
