"""The command line: `ckptmove VERB SRC [options]`.

Data goes to stdout, everything else to stderr. The exit code says what happened; see `errors`.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from types import FrameType
from typing import NoReturn

import click

from ..errors import CkptmoveError, CorruptError, UsageError, descriptor_error
from ..system.signals import ENDING, SignalReceived, end_by
from ..version import __version__
from .display.streams import take_streams
from .help_text import HelpContext

_BUG = 70
_OURS = "ckptmove: "
_ISSUES = "please report it, with the output of the same command and -v"

#: The commands in the order of the help, each with the first line of its docstring.
COMMANDS = {
    "batch": "Inspect, relocate, convert or validate all checkpoints of a folder tree.",
    "convert": "Convert a checkpoint to safetensors, or back to a file of torch.save.",
    "diff": "Show what differs between two checkpoints of any formats; exit 1 if they differ.",
    "doctor": "Find out why a model trains on the CPU or fails on the GPU, and how to fix it.",
    "inspect": "Show what a checkpoint holds, and on which devices.",
    "recover": "Undo an interrupted relocate --in-place; remove temporary files of killed "
    "commands.",
    "relocate": "Rewrite a checkpoint for another device.",
    "salvage": "Save what can still be read of a broken checkpoint; exit 1 if that is not all, or "
    "unproven.",
    "validate": "Check that a checkpoint is intact, equals its source, loads and trains; "
    "exit 1 if not.",
}


class _Commands(click.Group):
    """The commands; each is imported only when it is used, because importing all is slow."""

    context_class = HelpContext

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f".{cmd_name}", __name__), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS:
            from .first_use import unknown_command

            raise unknown_command(args[0], COMMANDS)
        found = super().resolve_command(ctx, args)
        ctx.with_resource(_signals())  # only now: while so much is imported, there is no undoing
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
    epilog="Exit codes: 0 done, 1 a check failed, 2 wrong usage, 3 the input can't "
    "be read or is refused, 4 refused before writing, 5 writing or verifying failed, 70 a bug, "
    "128+n a signal.",
)
@click.version_option(__version__, prog_name="ckptmove")
@click.pass_context
def cli(context: click.Context) -> None:
    """Inspect, relocate and convert PyTorch checkpoints without unpickling them.

    \b
    ckptmove inspect run.pt
    ckptmove relocate run.pt --to cuda:0
    ckptmove convert run.pt run.safetensors
    """
    if context.invoked_subcommand is None:
        from .first_use import examples

        help_text = context.get_help()
        click.echo("\n".join((help_text, *examples())))
        context.exit(2)


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    take_streams()
    code = run(sys.argv[1:])
    gc.freeze()  # the process ends, so skip the slow search for garbage
    sys.exit(code)


def run(args: list[str]) -> int:
    """Run the command line and return the exit code.

    Errors become one line on stderr. A signal first unwinds the stack, so that no temporary file is
    left, and then ends the process.
    """
    gc.disable()  # the process keeps all that it builds, and then ends
    try:
        code = cli.main(args, prog_name="ckptmove", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.UsageError as error:
        message = error.format_message().removesuffix(".")
        return _say(UsageError(message, hint=_help_of(error.ctx)))
    except click.ClickException as error:
        return _say(UsageError(error.format_message()))
    except CkptmoveError as error:
        return _say(error)
    except MemoryError:
        from ..sources.budget import NO_MEMORY  # here and below: imports that only errors need

        return _say(CorruptError(NO_MEMORY))
    except (KeyboardInterrupt, click.Abort):
        return end_by(signal.SIGINT)
    except SignalReceived as error:
        return end_by(error.number)
    except Exception as error:
        if (known := descriptor_error(error)) is not None:
            return _say(known)
        if "-v" in args or "--verbose" in args:
            raise
        _complain(f"a bug in ckptmove: {type(error).__name__}: {error}; {_ISSUES}")
        return _BUG


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Make signals unwind the stack instead of ending the process at once."""

    def unwind(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)  # a second one is immediate
        raise SignalReceived(number)

    handlers = {
        number: signal.default_int_handler if number == signal.SIGINT else unwind
        for number in ENDING
    }
    before = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if signal.getsignal(number) is signal.SIG_DFL
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _help_of(context: click.Context | None) -> str:
    return f"see {'ckptmove' if context is None else context.command_path} --help"


def _say(error: CkptmoveError) -> int:
    _complain(str(error), where=error.path or "", hint=error.hint or "")
    return error.exit_code


def _complain(message: str, *, where: str = "", hint: str = "") -> None:
    from ..display.blocks import Wrong, paint
    from ..display.text import LONGEST_REASON, one_line, printable
    from ..sources import mask_secrets
    from .display.terminal import terminal_of

    where, message, hint = (mask_secrets(printable(each)) for each in (where, message, hint))
    line = one_line(where, message, hint, LONGEST_REASON - len(_OURS))
    with contextlib.suppress(OSError):
        color = terminal_of(sys.stderr).color
        ours = paint(Wrong(_OURS), _OURS) if color else _OURS
        click.echo(ours + line, err=True, color=color)
