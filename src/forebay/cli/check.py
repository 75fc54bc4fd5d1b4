"""``forebay check``: say what a configuration would be refused for, before it runs anywhere."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

HELP = "check a configuration against the rules of forebay or of Megatron"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the verb takes."""
    parser.add_argument(
        "recipe",
        metavar="CONFIG|RECIPE",
        help="a recipe's name or a .yaml file; with --engine megatron also a YAML file of Megatron Bridge, a text file "
        "of overrides, or overrides alone",
    )
    parser.add_argument("words", metavar="key.sub=value", nargs="*", help="change a value")
    parser.add_argument(
        "--engine", choices=["native", "megatron"], default="native", help="who will run it (default: native, forebay)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print what is refused; 0 if nothing is, 1 otherwise."""
    report = check(arguments.recipe, arguments.words, arguments.engine)
    print(json.dumps(report, indent=1) if arguments.json else _text(report))
    return 0 if report["accepted"] else 1


def check(name: str, words: list[str], engine: str) -> dict[str, Any]:
    """Return the findings as they are printed with ``--json``.

    Args:
        name: a recipe, a file, or the first of the words.
        words: overrides.
        engine: ``"native"`` or ``"megatron"``.

    Raises:
        ValueError: for what cannot be read as a configuration.
        FileNotFoundError: for a file that does not exist.
    """
    from forebay.config import megatron_file
    from forebay.config.rule_table import RULES
    from forebay.config.rules import violations

    recipe = None if "=" in name else name
    words = words if recipe else [name, *words]
    if engine == "megatron":
        foreign = megatron_file.read(recipe, words)
    else:
        foreign = megatron_file.Foreign(_resolve(recipe, words))
    found = violations(foreign.resolved.config, engine, sources=foreign.resolved.sources)  # type: ignore[arg-type]
    return {
        "config": foreign.resolved.name,
        "engine": engine,
        "accepted": not found,
        "num_rules": sum(engine in rule.engines for rule in RULES),
        "violations": [dataclasses.asdict(violation) for violation in found],
        "not_checked": {key: str(value) for key, value in foreign.not_checked.items()},
        "hints": foreign.hints,
    }


def _resolve(recipe: str | None, words: list[str]) -> Any:
    from forebay.config.resolve import resolve

    if recipe is None:
        raise ValueError(
            f"{words[0]!r} is an override, and there is no recipe that it changes; name one first (`forebay recipes` "
            "lists them), or use --engine megatron, which checks overrides alone"
        )
    try:
        return resolve(recipe, words)
    except ValueError as error:
        if recipe.endswith((".yaml", ".yml")) and f"file {recipe}: unknown key" in str(error):
            raise ValueError(f"{error}. Files of Megatron Bridge are checked with --engine megatron") from None
        raise


def _text(report: dict[str, Any]) -> str:
    found = report["violations"]
    what = {0: "accepted", 1: "1 setting is refused"}.get(len(found), f"{len(found)} settings are refused")
    lines = [f"{report['config']}, engine {report['engine']}, {report['num_rules']} rules: {what}"]
    for place, violation in enumerate(found, start=1):
        lines.append(f"  {place}. {violation['message']}")
        lines.append(f"     fix: {violation['fix']}")
        lines.append(f"     rule {violation['number']}: {violation['rule']}")
    if report["not_checked"]:
        lines.append(f"not checked: {len(report['not_checked'])} settings that no rule looks at (--json lists them)")
        lines += [f"  {key}: did you mean {hint}?" for key, hint in report["hints"].items()]
    return "\n".join(lines)
