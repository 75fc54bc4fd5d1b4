"""``forebay config``: print a configuration and where each value came from."""

from __future__ import annotations

import argparse

HELP = "print the resolved configuration, each value with its source"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the verb takes."""
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe's name, or the path of a .yaml file")
    parser.add_argument("words", metavar="key.sub=value", nargs="*", help="change a value; `forebay config` shows all")


def run(arguments: argparse.Namespace) -> int:
    """Print YAML that can be given to ``forebay train`` again."""
    from forebay.config.dump import dump
    from forebay.config.resolve import resolve

    print(dump(resolve(arguments.recipe, arguments.words)), end="")
    return 0
