"""From a recipe or file and the words of a command line to one configuration that knows its sources."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forebay import recipes
from forebay.config import keys, yaml_format
from forebay.config.hf import field_names
from forebay.config.overrides import parse_word, set_value
from forebay.config.schema import Config

COMMAND_LINE = "command line"
DEFAULT = "default"
_FILE = "file "


@dataclasses.dataclass
class Resolved:
    """A configuration, and where each value in it came from.

    Attributes:
        config: the values.
        name: the recipe's name or the file's path.
        description: what the recipe is, in a line.
        sources: of the keys that are not at their default.
    """

    config: Config
    name: str
    description: str
    sources: dict[str, str]

    def source(self, key: str) -> str:
        """Return where a value came from: ``default``, ``recipe NAME``, ``file PATH`` or ``command line``.

        Args:
            key: dotted, such as ``train.train_iters`` or ``model.hf_config.rope_theta``.

        Raises:
            ValueError: for a key that does not exist.
        """
        keys.check_key(key, "source")
        while True:
            if key in self.sources:
                return self.sources[key]
            if not key.startswith(keys.FREE_KEY + "."):
                return DEFAULT
            key = key.rpartition(".")[0]

    def to_yaml(self) -> str:
        """Return the configuration as YAML that resolves to the same values; see :func:`forebay.config.dump`."""
        from forebay.config.dump import dump

        return dump(self)


def resolve(recipe_or_path: str | Path, overrides: Sequence[str] = ()) -> Resolved:
    """Return the configuration that a recipe, changed by some words, describes.

    Values are checked for their type only; :func:`forebay.config.validate` checks what they mean together.

    Args:
        recipe_or_path: the name of a shipped recipe, or the path of a YAML file (it ends in .yaml or .yml or
            contains a slash).
        overrides: words ``section.key=value``, later ones winning.

    Raises:
        ValueError: for an unknown recipe or key, a value of the wrong type, or a word that is no override.
        FileNotFoundError: for a file that does not exist.
    """
    name = str(recipe_or_path)
    if isinstance(recipe_or_path, Path) or name.endswith((".yaml", ".yml")) or "/" in name:
        where = f"{_FILE}{name}"
        data = _read_file(Path(name).expanduser(), where)
    else:
        where = f"recipe {name}"
        data = recipes.load(name)
    config = Config()
    # Two recipes must not write into each other's folder.
    config.logger.output_dir = f"runs/{Path(name).stem}"
    sources: dict[str, str] = {}
    description = data.pop("description", "")
    if not isinstance(description, str):
        raise ValueError(f"{where}: description must be text, got {description!r}")
    for section, fields in data.items():
        if section not in keys.sections():
            raise keys.unknown_key_error(str(section), where)
        if not isinstance(fields, dict):
            raise ValueError(f"{where}: {section} must be a mapping of keys to values, got {fields!r}")
        for field, value in fields.items():
            key = f"{section}.{field}"
            if key not in keys.field_types():
                raise keys.unknown_key_error(key, where)
            setattr(getattr(config, section), field, copy.deepcopy(keys.from_value(key, value, where)))
            _record(sources, key, value, where)
    for word in overrides:
        key, value = parse_word(word)
        set_value(config, key, value)
        _record(sources, key, value, COMMAND_LINE)
    _check_fields_take_effect(config, sources)
    return Resolved(config, name, description, sources)


def is_from_user(source: str | None) -> bool:
    """Return whether a source, None for the default, is the command line or a file of the user's own."""
    return source is not None and (source == COMMAND_LINE or source.startswith(_FILE))


def _check_fields_take_effect(config: Config, sources: Mapping[str, str]) -> None:
    """Refuse fields of ``hf_config`` from the command line that something else replaces."""
    model = config.model
    given = [
        key
        for key, source in sources.items()
        if source == COMMAND_LINE and (key == keys.FREE_KEY or key.startswith(keys.FREE_KEY + "."))
    ]
    if given and model.path is not None:
        raise ValueError(
            f"override {given[0]}: has no effect, the model in model.path={model.path} has its own configuration; "
            "leave one of the two out"
        )
    for key, field in field_names(str(model.hf_config.get("model_type"))).items():
        value = getattr(model, key)
        if value is not None and f"{keys.FREE_KEY}.{field}" in given and model.hf_config[field] != value:
            raise ValueError(
                f"override {keys.FREE_KEY}.{field}={model.hf_config[field]}: has no effect, model.{key}={value} "
                f"({sources[f'model.{key}']}) replaces it; set model.{key}={model.hf_config[field]} instead"
            )


def _read_file(path: Path, where: str) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{where}: no such file; the shipped recipes are {', '.join(recipes.list_recipes())}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error})") from None
    data = yaml_format.parse(text, where)
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected sections such as train: and model:, got {type(data).__name__}")
    return data


def _record(sources: dict[str, str], key: str, value: Any, source: str) -> None:
    # A value replaces all that lay below its key.
    for old in [old for old in sources if old.startswith(key + ".")]:
        del sources[old]
    if key.startswith(keys.FREE_KEY) and isinstance(value, Mapping) and value:
        for name, inner in value.items():
            _record(sources, f"{key}.{name}", inner, source)
        sources.pop(key, None)
    else:
        sources[key] = source
