"""YAML as people write it: ``1e-6`` is a number, ``on`` and ``no`` are text, a key given twice is an error.

PyYAML follows YAML 1.1, where the first is text and the second are booleans.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

_FLOAT = re.compile(
    r"[-+]?(?:(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+|[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|\.(?:inf|Inf|INF))\Z|\.(?:nan|NaN|NAN)\Z"
)
_INT = re.compile(r"(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_NULL = re.compile(r"(?:~|null|Null|NULL|None)?\Z")
_RESOLVERS: tuple[tuple[str, re.Pattern[str], list[str]], ...] = (
    ("tag:yaml.org,2002:bool", _BOOL, list("tTfF")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789.")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own name)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice (line {line})")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    # PyYAML's resolvers stay: text that either reading takes for something else is quoted.
    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def parse(text: str, where: str) -> Any:
    """Return what a YAML text says.

    Args:
        text: one YAML document.
        where: what the text is, for the error.

    Raises:
        ValueError: when it is not YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not valid YAML ({' '.join(str(error).split())})") from None


def format_scalar(value: Any) -> str:
    """Return a value as YAML on one line, such that :func:`parse` gives the same value again."""
    # The marker of a plain document's end is no part of the value.
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**9, sort_keys=False, allow_unicode=True)
    return text.removesuffix("...\n").rstrip("\n")
