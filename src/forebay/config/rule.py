"""What a rule is, and how it looks at a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from forebay.config.hf import field_names
from forebay.config.schema import Config

Engine = Literal["native", "megatron"]
BOTH: tuple[Engine, ...] = ("native", "megatron")
NATIVE: tuple[Engine, ...] = ("native",)
MEGATRON: tuple[Engine, ...] = ("megatron",)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of the table in :mod:`forebay.config.rule_table`.

    Attributes:
        id: a stable name.
        condition: what is refused, for the documentation.
        is_broken: whether a configuration breaks the rule.
        message: what is wrong; ``{train.seed}`` stands for a value, ``{num_layers}`` for an
            architecture key's, taken from ``hf_config`` if it is not overridden.
        fix: what to set instead.
        engines: where it holds.
        only_if_user_set: a key; the rule holds only when the user gave it a value, not when a recipe did.
        describe: makes message and fix where they depend on more than values; ``message`` and ``fix`` are then what
            the documentation says.
    """

    id: str
    condition: str
    is_broken: Callable[[Config], bool]
    message: str
    fix: str
    engines: tuple[Engine, ...] = BOTH
    only_if_user_set: str | None = None
    describe: Callable[[Config], tuple[str, str]] | None = None


def get(config: Config, key: str) -> Any:
    """Return the value of a dotted key."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def size(config: Config, key: str) -> int | None:
    """Return an architecture key's value, also from ``hf_config``; None if only transformers knows it."""
    value = getattr(config.model, key)
    if value is None:
        fields = config.model.hf_config
        value = fields.get(field_names(str(fields.get("model_type"))).get(key, key))
    return value if type(value) is int else None


def layers_out_of_range(config: Config) -> bool:
    """Return whether ``cpu_offloading_num_layers`` names more layers than all but one, or fewer than none."""
    model, total = config.model, size(config, "num_layers")
    # The reference's documents contradict each other about the range; this is what its code accepts.
    return model.cpu_offloading_num_layers < 0 or (total is not None and model.cpu_offloading_num_layers >= total)
