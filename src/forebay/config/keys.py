"""The dotted keys of a configuration: which there are, of which type, and how a value is read."""

from __future__ import annotations

import dataclasses
import decimal
import difflib
import functools
import math
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from forebay.config import yaml_format
from forebay.config.schema import Config

FREE_KEY = "model.hf_config"
"""The one key whose value is a mapping of names that forebay does not know beforehand."""

_NONE = type(None)
_EXAMPLES = {int: "8", float: "0.5", str: "some/text", bool: "True"}
_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "True or False", _NONE: "null"}


@functools.cache
def field_types() -> dict[str, Any]:
    """Return the type of every dotted key, sections left out."""
    found: dict[str, Any] = {}
    for section, section_type in get_type_hints(Config).items():
        for name, annotation in get_type_hints(section_type).items():
            found[f"{section}.{name}"] = annotation
    return found


@functools.cache
def sections() -> tuple[str, ...]:
    """Return the names of the configuration's sections."""
    return tuple(f.name for f in dataclasses.fields(Config))


def closest(key: str, choices: list[str]) -> str | None:
    """Return the choice that a mistyped name was probably meant to be."""
    exact_tail = [choice for choice in choices if choice.rpartition(".")[2] == key.rpartition(".")[2]]
    if exact_tail:
        return exact_tail[0]
    found = difflib.get_close_matches(key, choices, n=1, cutoff=0.5)
    if found:
        return found[0]
    tails = {choice.rpartition(".")[2]: choice for choice in choices}
    found = difflib.get_close_matches(key.rpartition(".")[2], list(tails), n=1, cutoff=0.6)
    return tails[found[0]] if found else None


def unknown_key_error(key: str, where: str) -> ValueError:
    """Return the error for a key that does not exist."""
    if key in sections():
        example = next(k for k in field_types() if k.startswith(key + "."))
        return ValueError(f"{where}: {key} is a section; name a key in it, such as {example}")
    best = closest(key, list(field_types()))
    hint = f"did you mean {best}?" if best else "`forebay config RECIPE` prints every key"
    return ValueError(f"{where}: unknown key {key}; {hint}")


def check_key(key: str, where: str) -> None:
    """Raise ValueError unless ``key`` can be given a value."""
    if key in field_types():
        return
    parts = key.split(".")
    if key.startswith(FREE_KEY + ".") and all(parts):
        return
    raise unknown_key_error(key, where)


def from_text(key: str, text: str, where: str) -> Any:
    """Return the value that the text of an override stands for.

    Raises:
        ValueError: naming the key, the text, the expected type and an example.
    """
    if key == FREE_KEY or key.startswith(FREE_KEY + "."):
        value = yaml_format.parse(text, where)
        return from_value(key, value, where, shown=repr(text)) if key == FREE_KEY else value
    alternatives = _alternatives(field_types()[key])
    if _NONE in alternatives and text.lower() in ("none", "null", "~"):
        return None
    for annotation in alternatives:
        value = _read(annotation, text, where)
        if _is_of_type(value, annotation):
            return value
    raise _type_error(key, repr(text), where)


def from_value(key: str, value: Any, where: str, *, shown: str | None = None) -> Any:
    """Return ``value`` if it is of the key's type; whole numbers are also numbers.

    Raises:
        ValueError: naming the key, the value, the expected type and an example.
    """
    alternatives = _alternatives(field_types()[key])
    if float in alternatives and type(value) is int:
        value = float(value)
    if any(_is_of_type(value, annotation) for annotation in alternatives):
        return value
    raise _type_error(key, shown or repr(value), where)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (types.UnionType, Union) else (annotation,)


def _read(annotation: Any, text: str, where: str) -> Any:
    if get_origin(annotation) is list:
        return yaml_format.parse(text, where)
    if annotation is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            return _whole_number(text) if annotation is int else text
    return text


def _whole_number(text: str) -> Any:
    """Return 1e3 as 1000, and ``text`` itself when it is no whole number."""
    try:
        # Through Decimal, because a float would round large ones.
        value = decimal.Decimal(text)
    except decimal.InvalidOperation:
        return text
    is_whole = value.is_finite() and abs(value) < 2**63 and value == value.to_integral_value()
    return int(value) if is_whole else text


def _is_of_type(value: Any, annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return isinstance(value, str) and value in get_args(annotation)
    if get_origin(annotation) is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if get_origin(annotation) is dict:
        return isinstance(value, dict) and all(isinstance(name, str) for name in value)
    if annotation is float:
        return type(value) is float and math.isfinite(value)
    if annotation is str:
        return type(value) is str and value != ""
    return type(value) is annotation


def _type_error(key: str, shown: str, where: str) -> ValueError:
    alternatives = _alternatives(field_types()[key])
    expected = " or ".join(map(_describe, alternatives))
    return ValueError(f"{where}: {key} must be {expected}, got {shown}; for example {key}={_example(key)}")


def _describe(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if get_origin(annotation) is list:
        return "a list of names"
    if get_origin(annotation) is dict:
        return "a mapping of names to values"
    return _NAMES[annotation]


def _example(key: str) -> str:
    annotation = _alternatives(field_types()[key])[0]
    if get_origin(annotation) is Literal:
        return str(get_args(annotation)[0])
    if get_origin(annotation) is list:
        return "[core_attn,mlp]"
    if get_origin(annotation) is dict:
        return "{model_type: llama}"
    return "3e-4" if key.endswith("lr") else _EXAMPLES[annotation]
