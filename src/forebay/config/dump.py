"""A configuration as text."""

from __future__ import annotations

import dataclasses
from typing import Any

from forebay.config import keys
from forebay.config.resolve import Resolved
from forebay.config.yaml_format import format_scalar

_COMMENT_COLUMN = 64


def dump(resolved: Resolved) -> str:
    """Return every value as YAML, each with its source in a comment; it resolves to the same values again."""
    lines = [f"# resolved from {resolved.name}"]
    if resolved.description:
        lines.append(f"description: {format_scalar(resolved.description)}")
    for section in keys.sections():
        lines.append(f"{section}:")
        holder = getattr(resolved.config, section)
        for field in dataclasses.fields(holder):
            _append(lines, resolved, f"{section}.{field.name}", getattr(holder, field.name), indent=2)
    return "\n".join(lines) + "\n"


def _append(lines: list[str], resolved: Resolved, key: str, value: Any, indent: int) -> None:
    name = " " * indent + format_scalar(key.rpartition(".")[2]) + ":"
    if isinstance(value, dict) and value:
        lines.append(name)
        for inner_name, inner in value.items():
            _append(lines, resolved, f"{key}.{inner_name}", inner, indent + 2)
        return
    text = f"{name} {format_scalar(value)}"
    lines.append(f"{text.ljust(_COMMENT_COLUMN)}  # {resolved.source(key)}")
