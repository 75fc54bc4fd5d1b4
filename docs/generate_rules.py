"""Write the table of rules into docs/rules.md.

python docs/generate_rules.py          writes it
python docs/generate_rules.py --check  exits with 1 if it is not current
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forebay.config.rule_table import RULES

PAGE = Path(__file__).with_name("rules.md")
BEGIN = "<!-- rules: written by docs/generate_rules.py -->"
END = "<!-- end of rules -->"


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


def page(old: str) -> str:
    """Return the page with the table of now between the two marks."""
    before, _, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE}: the lines {BEGIN!r} and {END!r} must be there, in this order")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description="Write the table of rules into docs/rules.md.")
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    arguments = parser.parse_args()
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if arguments.check:
        if new != old:
            print(f"{PAGE} is not current; run python docs/generate_rules.py", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
