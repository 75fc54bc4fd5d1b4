"""``forebay memory``: what a running job holds, by tier and purpose."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

HELP = "show what a running job holds, by tier and purpose"
_CLEAR = "\x1b[H\x1b[J"  # cursor home, erase below


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the verb takes."""
    parser.add_argument("run", metavar="RUN", help="the folder of a run, or the name of its recipe")
    parser.add_argument("--once", action="store_true", help="print once (default where output is no terminal)")
    parser.add_argument("--interval", metavar="S", type=float, default=1.0, help="seconds between views (default: 1)")
    parser.add_argument("--snapshot", action="store_true", help="also write memory.pickle for pytorch.org/memory_viz")
    parser.add_argument("--json", action="store_true", help="print one JSON object, once")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder for memory.pickle (default: the run's)")


def run(arguments: argparse.Namespace) -> int:
    """Show the run's memory once, or again and again until it ends."""
    from forebay.report import memory

    if not arguments.interval > 0:
        raise ValueError(f"--interval {arguments.interval:g}: must be above 0 seconds")
    folder = memory.find_run(arguments.run)
    found = memory.read(folder)
    if arguments.snapshot:
        target = folder if arguments.output is None else arguments.output.expanduser()
        target.mkdir(parents=True, exist_ok=True)
        found["snapshot"] = str(target / "memory.pickle")
        memory.write_torch_snapshot(target / "memory.pickle", found)
    if arguments.json:
        print(json.dumps(found))
        return 0
    if arguments.quiet:
        return 0
    is_live = not arguments.once and not arguments.snapshot and sys.stdout.isatty()
    while is_live and found["state"] == "running":
        print(_CLEAR + "\n".join([*memory.lines(found), "Ctrl-C ends this view, not the run"]), flush=True)
        time.sleep(arguments.interval)
        found = memory.read(folder)
    print((_CLEAR if is_live else "") + "\n".join(memory.lines(found)))
    if arguments.snapshot:
        print(f"for https://pytorch.org/memory_viz: {found['snapshot']}")
    return 0
