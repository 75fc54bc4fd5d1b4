"""``forebay recipes``: list what ships with forebay."""

from __future__ import annotations

import argparse

HELP = "list the recipes that come with forebay"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the verb takes: nothing."""


def run(arguments: argparse.Namespace) -> int:
    """Print each recipe's name and description."""
    from forebay import recipes

    names = recipes.list_recipes()
    width = max(map(len, names))
    for name in names:
        print(f"{name.ljust(width)}  {recipes.load(name)['description']}")
    return 0
