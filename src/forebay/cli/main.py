"""The ``forebay`` command: one module per verb, and one place that turns errors into messages."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import forebay
from forebay.cli import calibrate, check, config, doctor, memory, plan, recipes, sweep, trace, train, verify

DEBUG_VARIABLE = "FOREBAY_DEBUG"
_VERBS = {
    "train": train,
    "calibrate": calibrate,
    "plan": plan,
    "check": check,
    "config": config,
    "doctor": doctor,
    "verify": verify,
    "sweep": sweep,
    "trace": trace,
    "memory": memory,
    "recipes": recipes,
}
_EXAMPLE = """\
example:
  forebay train tiny_llama_demo train.train_iters=100 optimizer.optimizer_offload_fraction=0.5

FOREBAY_DEBUG=1 shows where in forebay an error arose."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="forebay",
        description="Train language models with part of their memory on the host.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"forebay {forebay.__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", dest="verb")
    for name, module in _VERBS.items():
        verb = verbs.add_parser(name, help=module.HELP, description=(module.__doc__ or "").splitlines()[0])
        module.add_arguments(verb)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        argv: the words after ``forebay``. Default: those of the process.

    Returns:
        0; 1 when training failed or a check found something; 2 for what the user can mend; 130 after Ctrl-C.
    """
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if arguments.verb is None:
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        parser.print_help()
        return 0
    if rest:
        if not hasattr(arguments, "words"):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        # argparse takes --key=value for an option; the override's own error says how it is written.
        arguments.words = [*arguments.words, *rest]
    try:
        code = _VERBS[arguments.verb].run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader, such as head, has seen enough; what is still buffered must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, MemoryError, OSError) as error:
        if os.environ.get(DEBUG_VARIABLE) == "1":
            raise
        print(f"error: {str(error) or type(error).__name__}", file=sys.stderr)
        return 2
