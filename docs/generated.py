"""What the scripts that write parts of a document share: such a part lies between two marks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main(script: str, page: str, name: str, text: str) -> int:
    """Write a part of a page, or with ``--check`` only say whether it is current; return the exit code.

    Args:
        script: the calling script's file.
        page: a document beside it.
        name: of the part: it lies between ``<!-- NAME: written by docs/SCRIPT -->`` and ``<!-- end of NAME -->``.
        text: what belongs there.
    """
    parser = argparse.ArgumentParser(description=f"Write the {name} into docs/{page}.")
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    arguments = parser.parse_args()
    path = Path(script).with_name(page)
    begin, end = f"<!-- {name}: written by docs/{Path(script).name} -->", f"<!-- end of {name} -->"
    old = path.read_text(encoding="utf-8")
    before, _, rest = old.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{path}: the lines {begin!r} and {end!r} must be there, in this order")
    new = f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"
    if arguments.check:
        if new != old:
            print(f"{path} is not current; run python docs/{Path(script).name}", file=sys.stderr)
        return int(new != old)
    path.write_text(new, encoding="utf-8")
    return 0
