"""An option is declared once, in the signature of its verb, and is the same everywhere."""

from __future__ import annotations

import ast
import errno
import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_type_hints

import click
import pytest

import ckptmove
from ckptmove.api.options import Option, declare_options, options_of
from ckptmove.batches.options import VERBS, item_options
from ckptmove.cli import COMMANDS, cli
from tests.conftest import ROOT

#: What only the command line has, and why.
CLI_ONLY = {
    "json": "a report has to_json",
    "html": "a report has to_html",
    "quiet": "the library does not print",
    "verbose": "the same",
    "no-progress": "the library calls back",
    "help": "Python has it",
    "tensors": "of inspect: how to print the manifest",
    "tree": "of inspect: the same",
    "output": "of relocate: another way to give dst",
    "log": "of batch: the library gives the results one by one",
    "manifest": "of batch: the results carry digests",
    "metrics": "of batch: the library gives the results one by one",
    "progress": "of batch: the library calls back",
}
#: What only the library has, besides what is positional on the command line.
LIBRARY_ONLY = {
    "progress": "a callable",
    "executor": "an object",
    "contents": "of batch: --html asks for it",
    "args": "what follows -- on the command line",
    "quiet": "the general option -q",
    "options": "those of the verb",
}
POSITIONAL = {"src", "dst", "a", "b", "path", "verb"}
SINGLE = [name for name in COMMANDS if name != "batch"]


def spelled(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by their long names."""
    options = [each for each in command.params if isinstance(each, click.Option)]
    return {max(each.opts, key=len).removeprefix("--"): each for each in options}


def command_of(*names: str) -> click.Command:
    """A command, or one of those of `batch`."""
    command: click.Command = cli
    for name in names:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    return command


def plain(text: str) -> str:
    """A text as both the command line and Python spell it."""
    return re.sub(r"[`_-]", "", text).lower()


def parameters_of(verb: str) -> dict[str, inspect.Parameter]:
    """The parameters of a verb that are options."""
    found = inspect.signature(getattr(ckptmove, verb)).parameters
    return {name.replace("_", "-"): each for name, each in found.items() if name not in POSITIONAL}


@pytest.mark.parametrize("verb", SINGLE)
def test_a_command_has_the_options_of_its_verb_and_no_others(verb: str) -> None:
    options = set(spelled(command_of(verb))) - {*CLI_ONLY}
    assert options == set(parameters_of(verb)) - {*LIBRARY_ONLY}


@pytest.mark.parametrize("verb", VERBS)
def test_a_batch_has_the_options_of_its_verb_too(verb: str) -> None:
    options = set(spelled(command_of("batch", verb))) - {*CLI_ONLY}
    expected = {*parameters_of("batch"), *parameters_of(verb)} - {*LIBRARY_ONLY}
    if verb == "validate":  # what it writes are reports
        expected = expected - {"copy-rest", "delete-source"} | {"force"}
    if verb == "inspect":  # it writes nothing
        expected -= {"copy-rest", "delete-source", "digests", "dry-run", "verify"}
    if verb == "relocate":  # a rule for a tree need not match in each item
        expected -= {"allow-unmatched"}
    if verb != "convert":  # nothing else changes a suffix
        expected = expected - {"keep-suffix"}
    assert options == expected
    assert {name.replace("_", "-") for name in item_options(verb)} < options


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_describes_every_option_in_full(verb: str) -> None:
    """In the docs of the function, with the sentence of the command line."""
    function = getattr(ckptmove, verb)
    text = " ".join((inspect.getdoc(function) or "").split())
    names = [name for name in inspect.signature(function).parameters if name != "options"]
    described = [text.find(f" {name}: ") for name in names]
    assert -1 not in described
    assert described == sorted(described)
    for declared in options_of(function).values() if verb != "recover" else ():
        assert declared.option.help.endswith(".")
        assert plain(declared.option.help) in plain(text)


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_type_checker_and_a_reader_see_plain_types(verb: str) -> None:
    function = getattr(ckptmove, verb)
    assert "Annotated" not in str(inspect.signature(function))
    assert get_type_hints(function)["return"] is not None
    for declared in options_of(function).values() if verb != "recover" else ():
        parameter = inspect.signature(function).parameters[declared.name]
        assert parameter.default == declared.default


@pytest.mark.parametrize("verb", ["batch", "convert", "doctor", "validate"])
def test_what_a_value_may_be_is_said_once_for_docs_and_help(verb: str) -> None:
    function, help = getattr(ckptmove, verb), command_of(verb).help or ""
    texts = [each.option.value for each in options_of(function).values() if each.option.value]
    assert texts
    for text in texts:
        for shown in (help, inspect.getdoc(function) or ""):
            assert plain(" ".join(shown.split())).count(plain(text)) == 1


def calls(name: str) -> Iterator[ast.Call]:
    """All calls of a function of this name in the package."""
    for file in sorted((ROOT / "ckptmove").rglob("*.py")):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if f"{name}(" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                if called == name:
                    yield node


def test_no_sentence_stands_twice() -> None:
    """Neither in two declarations nor in a declaration and a command."""
    texts = [ast.unparse(node.args[0]) for node in calls("Option") if node.args]
    texts += [
        ast.unparse(keyword.value)
        for node in calls("option")
        for keyword in node.keywords
        if keyword.arg == "help"
    ]
    assert len(texts) > 50
    assert not [text for text, count in Counter(texts).items() if count > 1]


def test_a_command_spells_only_options_of_its_own() -> None:
    """What a verb declares is made from there, never written again."""
    known = {each for verb in COMMANDS for each in parameters_of(verb)} - {*CLI_ONLY}
    written = {
        argument.value
        for node in calls("option")
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }
    assert {"--json", "--log"} <= written
    assert not {f"--{name}" for name in known} & written


def test_a_verb_that_can_open_no_more_files_says_what_to_do() -> None:
    @declare_options
    def verb(number: int) -> None:
        """Fail as an import does."""
        raise OSError(number, os.strerror(number), "module.py")

    with pytest.raises(ckptmove.InputError, match="no more files can be opened") as caught:
        verb(errno.EMFILE)
    assert caught.value.hint == "raise ulimit -n"
    with pytest.raises(PermissionError):
        verb(errno.EACCES)


def test_declarations_make_signature_docs_and_former_names() -> None:
    @declare_options
    def verb(
        src: str,
        *,
        new_name: Annotated[
            str | None, Option("Do it, see --times and SRC.", "NAME", former="old_name")
        ] = None,
        times: Annotated[int, Option("Do it N times.", "N")] = 1,
        pairs: Annotated[dict[str, str] | None, Option("Map A to B.", "A=B")] = None,
    ) -> tuple[object, ...]:
        """Do it.

        Args:
            src: what it is done to.

        Returns:
            What it was called with.
        """
        return src, new_name, times, pairs

    expected = """Do it.

Args:
    src: what it is done to.
    new_name: do it, see `times` and `src`.
    times: do it N times.
    pairs: map A to B. A mapping from A to B.

Returns:
    What it was called with."""
    assert inspect.getdoc(verb) == expected
    former: Callable[..., Any] = verb
    with pytest.warns(DeprecationWarning, match="old_name is now called new_name"):
        assert former("a", old_name="b") == ("a", "b", 1, None)
    assert str(inspect.signature(verb)).startswith("(src: str, *, new_name: str | None = None")


def test_a_mapping_is_read_from_texts() -> None:
    """A glob may hold a `=`, and so may the text of metadata."""

    def values(command: str, *arguments: str) -> dict[str, Any]:
        return command_of(command).make_context(command, [*arguments]).params

    assert values("convert", "--metadata", "a=b=c")["metadata"] == {"a": "b=c"}
    assert values("relocate", "--place", "a=b=cpu")["place"] == {"a=b": "cpu"}
    assert values("convert", "--dtype", "bf16", "--dtype", "x=f32")["dtype"] == {
        "": "bf16",
        "x": "f32",
    }
    again = values("relocate", "--place", "a=cpu", "--place", "*=cpu", "--place", "a=mps")
    assert [*again["place"].items()] == [("*", "cpu"), ("a", "mps")]
    for text in ("a", "=b"):
        with pytest.raises(ckptmove.UsageError, match="does not have the form KEY=VALUE"):
            values("convert", "--metadata", text)
