"""Write the table of rules into docs/rules.md.

python docs/generate_rules.py          writes it
python docs/generate_rules.py --check  exits with 1 if it is not current
"""

from __future__ import annotations

import sys

from generated import main

from forebay.config.rule_table import RULES


def cell(text: str) -> str:
    """Return a text as it may stand in a cell."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def table() -> str:
    """Return the rules as one table, in the order in which violations are listed."""
    lines = ["| | rule | refused | message | fix | engines |", "|---|---|---|---|---|---|"]
    for number, rule in enumerate(RULES, start=1):
        texts = (str(number), f"`{rule.id}`", rule.condition, rule.message, rule.fix, ", ".join(rule.engines))
        lines.append(f"| {' | '.join(map(cell, texts))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(__file__, "rules.md", "rules", table()))
