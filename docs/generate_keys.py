"""Write the tables of configuration keys into docs/configuration.md.

python docs/generate_keys.py          writes them
python docs/generate_keys.py --check  exits with 1 if they are not current
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from typing import Any, Literal, get_args, get_origin

from generated import main

from forebay.config import keys, schema
from forebay.config.yaml_format import format_scalar

_TYPE_NAMES = {int: "whole number", float: "number", str: "text", bool: "True, False", type(None): "null"}


def explanations() -> dict[str, dict[str, str]]:
    """Return the text below each field of each class in the schema; Python itself keeps no such texts."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                field.target.id: text.value.value
                for field, text in zip(node.body, node.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            }
    return found


def type_text(annotation: Any) -> str:
    """Return a type as a reader of the table needs it: its values, where they can be listed."""
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) is list:
        return "list of names"
    if get_origin(annotation) is dict:
        return "mapping"
    if annotation in _TYPE_NAMES:
        return _TYPE_NAMES[annotation]
    return ", ".join(map(type_text, get_args(annotation)))


def tables() -> str:
    """Return one table for each section."""
    texts = explanations()
    defaults = schema.Config()
    lines: list[str] = []
    for section in keys.sections():
        holder = getattr(defaults, section)
        lines += [f"### {section}", "", "| key | values | default | |", "|---|---|---|---|"]
        for field in dataclasses.fields(holder):
            key = f"{section}.{field.name}"
            values = type_text(keys.field_types()[key])
            text = texts[type(holder).__name__][field.name].replace("``", "`").replace("|", "\\|").replace("\n", " ")
            default = format_scalar(getattr(holder, field.name))
            lines.append(f"| `{key}` | {values} | `{default}` | {' '.join(text.split())} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(__file__, "configuration.md", "keys", tables()))
