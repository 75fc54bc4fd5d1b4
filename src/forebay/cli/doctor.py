"""``forebay doctor``: look at this machine, or find cause and fix in a log."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.doctor import Diagnosis
    from forebay.doctor.environment import Finding

HELP = "look at this machine, or find cause and fix of what a log shows"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the verb takes."""
    parser.add_argument(
        "--log",
        metavar="FILE",
        type=Path,
        help="read a log of forebay, Megatron, DeepSpeed, FSDP or plain PyTorch instead of looking at the machine",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; 1 if something is wrong, else 0."""
    if arguments.log is not None:
        return _log(arguments.log, arguments.json)
    from forebay.doctor.environment import inspect_environment

    findings = inspect_environment()
    if arguments.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        print("\n".join(_finding_lines(findings)))
    return int(any(finding.is_problem for finding in findings))


def _log(path: Path, as_json: bool) -> int:
    from forebay.doctor.diagnose import diagnose

    if not path.expanduser().exists():
        raise FileNotFoundError(f"--log {path}: no such file")
    with path.expanduser().open(encoding="utf-8", errors="replace") as file:
        found = diagnose(file)
    if as_json:
        print(json.dumps([dataclasses.asdict(diagnosis) for diagnosis in found], indent=1))
    elif found:
        print("\n".join(line for diagnosis in found for line in _diagnosis_lines(diagnosis)))
    else:
        print(f"{path}: none of the symptoms that forebay knows (docs/doctor.md lists them)")
    return int(bool(found))


def _finding_lines(findings: list[Finding]) -> list[str]:
    width = max(len(finding.topic) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.topic.ljust(width)}  {finding.value}")
        if finding.advice:
            lines.append(f"{' ' * width}  {'problem' if finding.is_problem else 'note'}: {finding.advice}")
    return lines


def _diagnosis_lines(diagnosis: Diagnosis) -> list[str]:
    lines = [f"{diagnosis.symptom} ({diagnosis.confidence})", f"  cause: {diagnosis.cause}"]
    lines += [f"  fix: {fix}" if index == 0 else f"   or: {fix}" for index, fix in enumerate(diagnosis.fix)]
    return lines + [f"  line {number}: {text}" for number, text in diagnosis.evidence]
