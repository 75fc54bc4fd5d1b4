"""The arguments that several verbs share."""

from __future__ import annotations

import argparse


def add_recipe_and_words(parser: argparse.ArgumentParser) -> None:
    """Add RECIPE and the override words."""
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe, or path of a YAML file such as ./run.yaml")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="KEY.SUB=VALUE",
        help="overrides, for example train.train_iters=20; `forebay config RECIPE` prints every key",
    )
