"""``forebay calibrate``: measure this machine, and store what `forebay plan` goes by."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HELP = "measure this machine in under a minute, for `forebay plan`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the verb takes."""
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="where to store the profile (default: FOREBAY_PROFILE if set, else a file in the user's cache)",
    )
    parser.add_argument("--device", default="auto", help="auto (the GPU if there is one), cpu, cuda or cuda:N")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure, store and print."""
    from forebay.config.yaml_format import format_scalar
    from forebay.engine import get_engine
    from forebay.plan.calibrate import calibrate
    from forebay.plan.profile import FIELDS, stored_path
    from forebay.train.prepare import resolve_device

    path = (arguments.output or stored_path()).expanduser()
    # Before a minute is spent on what cannot be stored.
    path.parent.mkdir(parents=True, exist_ok=True)
    engine = get_engine(resolve_device(arguments.device))
    profile = calibrate(engine, progress=lambda what: print(f"measuring {what}", file=sys.stderr))
    data = profile.to_data()
    # JSON is YAML, one number a line.
    lines = [f"{format_scalar(key)}: {json.dumps(value, indent=2)}" for key, value in data.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps({"path": str(path), **data}, indent=1))
        return 0
    print(profile.description)
    for name, number in profile.numbers.items():
        print(f"{name.ljust(24)} {number.value:12.2f}  {FIELDS[name].text}")
    for name, value in profile.details.items():
        print(f"{name.ljust(24)} {json.dumps(value)}")
    print(f"stored in {path}")
    return 0
