"""What several verbs share: the arguments that say what is printed and where files go."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forebay.cli.config import add_arguments as add_recipe_arguments
from forebay.config.schema import Config


def add_output_arguments(parser: argparse.ArgumentParser, *, default_output: str) -> None:
    """Add ``--json``, ``--quiet`` and ``--output DIR``."""
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, nothing else")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors; the exit code tells")
    parser.add_argument("--output", metavar="DIR", type=Path, help=f"folder for files (default: {default_output})")


def output_folder(arguments: argparse.Namespace, verb: str) -> Path:
    """Return ``--output``, or ``runs/VERB_RECIPE``; it exists then.

    Raises:
        OSError: if it cannot be made.
    """
    folder: Path = arguments.output or Path("runs") / f"{verb}_{Path(arguments.recipe).stem}"
    folder = folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def show(arguments: argparse.Namespace, result: dict[str, Any], lines: Sequence[str]) -> None:
    """Print a result as the user asked for it."""
    if arguments.json:
        print(json.dumps(result))
    elif not arguments.quiet:
        print(*lines, sep="\n")


def check_step_counts(arguments: argparse.Namespace) -> None:
    """Raise ValueError unless ``--steps`` and ``--timed-steps`` are positive."""
    for option, value in (("--steps", arguments.steps), ("--timed-steps", arguments.timed_steps)):
        if value < 1:
            raise ValueError(f"{option} {value}: must be at least 1")


def progress(arguments: argparse.Namespace) -> Callable[[str], None]:
    """Return what prints a line about the progress, on standard error, unless the user wants none."""
    is_silent = arguments.json or arguments.quiet
    return lambda line: None if is_silent else print(line, file=sys.stderr, flush=True)


def refuse_auto(config: Config) -> None:
    """Raise ValueError if the fraction is still to be chosen: runs that are compared must be the same each time."""
    if config.optimizer.optimizer_offload_fraction == "auto":
        raise ValueError(
            "optimizer.optimizer_offload_fraction=auto depends on what is free on the GPU when a run starts; give the "
            "number that `forebay train` or `forebay plan` prints"
        )


__all__ = [
    "add_output_arguments",
    "add_recipe_arguments",
    "check_step_counts",
    "output_folder",
    "progress",
    "refuse_auto",
    "show",
]
