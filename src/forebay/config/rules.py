"""Applying the rules of :mod:`forebay.config.rule_table` to a configuration."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, get_args

from forebay.config.resolve import is_from_user
from forebay.config.rule import Engine, Rule, get, size
from forebay.config.rule_table import RULES
from forebay.config.schema import Config


@dataclasses.dataclass(frozen=True)
class Violation:
    """One thing that is wrong with a configuration.

    Attributes:
        rule: the rule's id.
        number: of the rule in the table, from 1.
        message: what is wrong.
        fix: what to set instead.
    """

    rule: str
    number: int
    message: str
    fix: str


def violations(
    config: Config, engine: Engine = "native", *, sources: Mapping[str, str] | None = None
) -> list[Violation]:
    """Return everything that ``engine`` refuses about a configuration.

    Args:
        config: all values of their right type.
        engine: ``"native"``, forebay's own trainer, or ``"megatron"``. Default ``"native"``.
        sources: of the values, from :class:`forebay.config.Resolved`. Values that nothing reads are refused only
            where the sources say that they are the user's own. Default None: unread values pass.

    Raises:
        ValueError: for an unknown engine.
    """
    if engine not in get_args(Engine):
        raise ValueError(f"unknown engine {engine!r}; choose one of {', '.join(get_args(Engine))}")
    found = []
    for number, rule in enumerate(RULES, start=1):
        if engine in rule.engines and _concerns(rule, sources or {}) and rule.is_broken(config):
            message, fix = rule.describe(config) if rule.describe else (_fill(rule.message, config), rule.fix)
            found.append(Violation(rule.id, number, message, fix))
    return found


def validate(config: Config, engine: Engine = "native", *, sources: Mapping[str, str] | None = None) -> None:
    """Check what the values of a configuration mean together.

    Args:
        config: all values of their right type.
        engine: see :func:`violations`.
        sources: see :func:`violations`.

    Raises:
        ValueError: listing every violation, numbered, each with its fix.
    """
    found = violations(config, engine, sources=sources)
    if not found:
        return
    what = "1 setting is" if len(found) == 1 else f"{len(found)} settings are"
    lines = [f"{what} refused"]
    for number, violation in enumerate(found, start=1):
        lines += [f"  {number}. {violation.message}", f"     fix: {violation.fix}"]
    raise ValueError("\n".join(lines))


def _concerns(rule: Rule, sources: Mapping[str, str]) -> bool:
    return rule.only_if_user_set is None or is_from_user(sources.get(rule.only_if_user_set))


def _fill(text: str, config: Config) -> str:
    def value(match: re.Match[str]) -> str:
        key = match.group(1)
        found: Any = get(config, key) if "." in key else size(config, key)
        return "null" if found is None else str(found)

    return re.sub(r"\{([a-z0-9_.]+)\}", value, text)
