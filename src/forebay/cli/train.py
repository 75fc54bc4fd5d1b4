"""``forebay train``: resolve, validate, train."""

from __future__ import annotations

import argparse
import sys

from forebay.cli.config import add_arguments

HELP = "train a recipe"

__all__ = ["HELP", "add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Train, and return the exit code."""
    from forebay.config.resolve import resolve
    from forebay.config.rules import validate

    resolved = resolve(arguments.recipe, arguments.words)
    validate(resolved.config, sources=resolved.sources)
    if resolved.config.optimizer.optimizer_offload_fraction == "auto":
        from forebay.plan.auto import choose_fraction

        print(choose_fraction(resolved), file=sys.stderr)
    # Only now: a mistake in the configuration is answered without waiting for torch.
    from forebay.train.trainer import NonFiniteLossError, train

    try:
        return train(resolved)
    except NonFiniteLossError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
