"""The words ``section.key=value`` of a command line."""

from __future__ import annotations

from typing import Any

from forebay.config import keys
from forebay.config.schema import Config


def parse_word(word: str) -> tuple[str, Any]:
    """Return the dotted key and the value of a word.

    Raises:
        ValueError: for a word that is no override, an unknown key, or a value of the wrong type; the text says
            what to write instead.
    """
    bare = word.lstrip("-+")
    key, equals, text = bare.partition("=")
    if bare != word:
        raise ValueError(f"override {word!r}: overrides start with the key; write {bare if equals else key + '=VALUE'}")
    if not equals:
        best = key if key in keys.field_types() else keys.closest(key, list(keys.field_types())) or "train.train_iters"
        raise ValueError(f"override {word!r}: expected key=value, for example {best}=VALUE")
    if key != key.strip() or text != text.strip():
        raise ValueError(f"override {word!r}: no spaces around '='; write {key.strip()}={text.strip()}")
    keys.check_key(key, f"override {word!r}")
    return key, keys.from_text(key, text, f"override {word!r}")


def set_value(config: Config, key: str, value: Any) -> None:
    """Set the value behind a dotted key.

    Raises:
        ValueError: for a key below a value that is no mapping.
    """
    section, field, *path = key.split(".")
    holder = getattr(config, section)
    if not path:
        setattr(holder, field, value)
        return
    mapping: dict[str, Any] = getattr(holder, field)
    for depth, part in enumerate(path[:-1]):
        inner = mapping.setdefault(part, {})
        if not isinstance(inner, dict):
            parent = ".".join((section, field, *path[: depth + 1]))
            raise ValueError(f"override {key}: {parent} is {inner!r} and holds no further keys; set {parent} itself")
        mapping = inner
    mapping[path[-1]] = value
