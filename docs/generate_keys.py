"""Write the tables of configuration keys into docs/configuration.md.

python docs/generate_keys.py          writes them
python docs/generate_keys.py --check  exits with 1 if they are not current
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from forebay.config import keys, schema
from forebay.config.yaml_format import format_scalar

PAGE = Path(__file__).with_name("configuration.md")
BEGIN = "<!-- keys: written by docs/generate_keys.py -->"
END = "<!-- end of keys -->"
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


def page(old: str) -> str:
    """Return the page with the tables of now between the two marks."""
    before, _, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE}: the lines {BEGIN!r} and {END!r} must be there, in this order")
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description="Write the tables of configuration keys into docs/configuration.md.")
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    arguments = parser.parse_args()
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if arguments.check:
        if new != old:
            print(f"{PAGE} is not current; run python docs/generate_keys.py", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
