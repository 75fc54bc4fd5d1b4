"""The recipes that come with forebay, one YAML file each; the file's name is the recipe's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


def list_recipes() -> list[str]:
    """Return the names of the shipped recipes, sorted."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def load(name: str) -> dict[str, Any]:
    """Return what a recipe's file says: ``description`` and the sections of a configuration.

    Raises:
        ValueError: for an unknown name, with the closest one.
    """
    from forebay.config import keys, yaml_format

    names = list_recipes()
    if name not in names:
        best = keys.closest(name, names)
        hint = f"did you mean {best}? " if best else ""
        raise ValueError(
            f"unknown recipe {name!r}; {hint}The recipes are {', '.join(names)}; a file of your own needs a path "
            "that ends in .yaml"
        )
    data = yaml_format.parse((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), f"recipe {name}")
    assert isinstance(data, dict), name
    return data
