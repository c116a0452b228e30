"""Entry point of `python -m ckptmove` and of the command `ckptmove`."""

import gc
import signal


def main() -> None:
    """Run the command line. Until it handles Ctrl-C, that ends the process without a word."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # the process keeps all that it builds, modules first, and then ends
    from .cli import main as run

    run()


if __name__ == "__main__":
    main()
