"""Which fields a transformers configuration has: transformers itself keeps a misspelt one and ignores it."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import sys
from collections.abc import Iterable
from typing import Any

from forebay.config import keys
from forebay.config.hf import field_names

# Fields that are no dataclass fields: older names that the class takes, and what a model reads if it is there.
_TAKEN = re.compile(r"kwargs\.(?:pop|get)\(\s*[\"'](\w+)[\"']")
_ROTARY = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
_READ = re.compile(r"(?:getattr|hasattr)\(\s*(?:self\.)?config,\s*[\"'](\w+)[\"']")


def check_fields(config_class: Any, names: Iterable[str]) -> None:
    """Check that a configuration class, or the model made from it, knows these fields.

    Args:
        config_class: of transformers, such as ``LlamaConfig``.
        names: the fields that are set.

    Raises:
        ValueError: for a field that would have no effect, with the closest known one.
    """
    known = known_fields(config_class)
    for name in names:
        if name not in known:
            # Megatron's names are the likeliest to be taken for those of transformers.
            alike = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.7)
            best = field_names(config_class.model_type).get(name) or (alike[0] if alike else None)
            hint = f"did you mean {keys.FREE_KEY}.{best}?" if best else "leave it out"
            raise ValueError(
                f"{keys.FREE_KEY}.{name}: {config_class.__name__} of transformers has no such field and would ignore "
                f"it; {hint}"
            )


def known_fields(config_class: Any) -> set[str]:
    """Return the names that have an effect on a configuration of this class or on its model."""
    from transformers import AutoModelForCausalLM

    known = {"model_type", *getattr(config_class, "attribute_map", {}), *_written(config_class)}
    if dataclasses.is_dataclass(config_class):
        known.update(field.name for field in dataclasses.fields(config_class))
    has_rotary_positions = "rope_parameters" in known
    for base in config_class.__mro__:
        members = vars(base)
        known.update(name for name, value in members.items() if isinstance(value, property))
        for name in ("__init__", "__post_init__"):
            method = inspect.unwrap(members.get(name, object.__init__))
            if inspect.isfunction(method):
                known.update(inspect.signature(method).parameters)
                known.update(_TAKEN.findall(_source(method)))
    # Every class takes these, also where no model has such positions.
    known = known | _ROTARY if has_rotary_positions else known - _ROTARY
    if config_class in AutoModelForCausalLM._model_mapping:
        model_class = AutoModelForCausalLM._model_mapping[config_class]
        known.update(_READ.findall(inspect.getsource(sys.modules[model_class.__module__])))
    return known - {"self", "args", "kwargs"}


def _written(config_class: Any) -> set[str]:
    """Return what a configuration of this class saves, so that a saved one can be given again."""
    from transformers import PreTrainedConfig

    try:
        return set(config_class().to_dict())
    except Exception:  # a few have no valid defaults, each with an exception of its own
        return set(PreTrainedConfig().to_dict())


def _source(method: Any) -> str:
    # What dataclasses generate has no source, and takes nothing but the fields.
    return inspect.getsource(method) if method.__code__.co_filename != "<string>" else ""
