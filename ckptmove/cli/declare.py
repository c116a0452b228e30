"""Make command-line options from the declarations of a verb, and show them in groups."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from inspect import cleandoc
from typing import Any

import click

from ..api.options import Declaration, values_of
from ..errors import UsageError
from .help_text import HelpContext

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]

_GENERAL = "General"
_MOST_UNGROUPED = 10  # the most options that a help lists without groups


class GroupedOption(click.Option):
    """An option with a heading in the help of its command, and with former names."""

    def __init__(
        self, *args: Any, group: str = _GENERAL, former: Sequence[str] = (), **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.group = group
        self.former = tuple(former)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Register the former names too; the help does not show them."""
        shown = self.opts
        self.opts = [*shown, *self.former]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = shown


class Command(click.Command):
    """A command whose help shows many options in groups."""

    context_class = HelpContext

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under the headings of their groups."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if row is not None:
                groups.setdefault(getattr(param, "group", _GENERAL), []).append(row)
        groups[_GENERAL] = groups.pop(_GENERAL)  # last
        if sum(map(len, groups.values())) <= _MOST_UNGROUPED:
            groups = {"Options": [row for rows in groups.values() for row in rows]}
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def option(*names: str, **settings: Any) -> Decorator:
    """Like `click.option`, but in a group: for options that only the command line has."""
    return click.option(*names, cls=GroupedOption, **settings)


def with_options(command: Function, *options: Decorator) -> Function:
    """Add these options to a command, in this order in its help."""
    for add in reversed(options):
        command = add(command)
    return command


def with_values(options: Mapping[str, Declaration]) -> Decorator:
    """Explain the values of options in the help of a command, before its examples."""

    def decorate(command: Function) -> Function:
        before, mark, examples = cleandoc(command.__doc__ or "").rpartition("\n\n\b\n")
        values = values_of(options).replace("`", "")
        command.__doc__ = f"{before}\n\n{values}{mark}{examples}"
        return command

    return decorate


def verb_options(options: Mapping[str, Declaration]) -> Decorator:
    """Add the options of a verb to its command; convert their values for the verb."""
    made = [_option_of(each, options) for each in options.values()]
    return lambda command: with_options(command, *made)


def _option_of(declared: Declaration, names: Container[str]) -> Decorator:
    spec = declared.option
    settings: dict[str, Any] = {"group": spec.group, "default": declared.default}
    spellings = [f"--{declared.name.replace('_', '-')}", declared.name]
    text = spec.help
    if spec.short:
        spellings.insert(0, f"-{spec.short}")
    if spec.former and spec.former not in names:
        settings["former"] = [f"--{spec.former.replace('_', '-')}"]
    if bool in declared.types:
        settings["is_flag"] = True
    else:
        settings["metavar"] = spec.metavar or None
        settings["type"] = _type_of(declared)
        settings["show_default"] = declared.default is not None and not declared.is_repeatable
    if declared.is_repeatable:
        settings |= {"multiple": True, "default": ()}
        text += " Repeatable."
    if declared.is_mapping:
        settings["callback"] = lambda context, param, texts: _mapping(declared, texts)
    if spec.default:
        text += f"  [default: {spec.default}]"
    return option(*spellings, help=text, **settings)


def _type_of(declared: Declaration) -> Any:
    if declared.choices:
        return click.Choice(declared.choices)
    return next((each for each in (float, int) if declared.types == (each,)), str)


def _mapping(declared: Declaration, texts: Sequence[str]) -> dict[str, str]:
    """Parse texts of the form KEY=VALUE; a repeated key takes its last value and place."""
    spec, found = declared.option, dict[str, str]()
    for text in texts:
        key, equals, value = text.rpartition("=")
        if spec.equals_in == "value":
            key, equals, value = text.partition("=")
        if not ((equals and key) or spec.metavar.startswith("[")):
            raise UsageError(f"--{declared.name} {text!r} does not have the form {spec.metavar}")
        found.pop(key, None)
        found[key] = value
    return found
