"""Measured runs, each in a process of its own: what is asked, how it is run, and what comes back.

A process of its own means that no run finds memory, caches or compiled code of another, that one which is killed for
want of memory takes nothing with it, and that runs which are to be compared cannot hide each other's faults.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import forebay

Status = Literal["ok", "out_of_memory", "refused", "failed", "killed"]
WORKER = [sys.executable, "-m", "forebay.report.worker"]
"""The command that measures a point; it is given the files of the point and of the result."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A run to measure.

    Attributes:
        recipe: its name, or a file.
        words: overrides.
        num_steps: whose losses are compared.
        num_timed_steps: after these, undisturbed, whose time and memory are measured.
        digests: whether the weights after each of the ``num_steps`` and the state after the last are digested.
        deterministic: whether the ``num_steps`` use deterministic kernels only. Default False: as configured.
        save_weights: the file for the weights after ``num_steps``, for comparisons that are not bitwise. Default None.
    """

    recipe: str
    words: tuple[str, ...]
    num_steps: int
    num_timed_steps: int
    digests: bool = False
    deterministic: bool = False
    save_weights: str | None = None

    @property
    def key(self) -> str:
        """What tells this point from others, also from those of another version of forebay."""
        file = Path(self.recipe).expanduser()
        content = file.read_bytes() if file.is_file() else b""
        text = json.dumps([forebay.__version__, dataclasses.asdict(self)])
        return hashlib.sha256(text.encode() + content).hexdigest()


@dataclasses.dataclass
class Result:
    """What measuring a point gave.

    Attributes:
        status: ``"ok"``; ``"out_of_memory"`` (refused before allocation, or failed on either tier); ``"refused"``
            (the configuration); ``"failed"`` (anything else that was raised); ``"killed"`` (no answer).
        error: what was said; empty when all went well.
        data: the measurements, see :func:`forebay.report.worker.measure`; empty unless ``"ok"``.
    """

    status: Status
    error: str
    data: dict[str, Any]


def run_point(point: Point, folder: Path, name: str) -> Result:
    """Measure a point, or take its result from an earlier call that was interrupted later.

    Args:
        point: what to measure.
        folder: gets ``NAME.json`` (the result), ``NAME.log`` (what the process printed) and ``NAME/`` (its run).
        name: of the point, a valid file name.

    Returns:
        The result. One that failed otherwise than for want of memory is measured anew.
    """
    answer, question = folder / f"{name}.json", folder / f"{name}.point.json"
    if (earlier := _read(answer, point)) is not None and earlier.status in ("ok", "out_of_memory"):
        return earlier
    answer.unlink(missing_ok=True)
    question.write_text(json.dumps(dataclasses.asdict(point) | {"folder": str(folder / name), "key": point.key}))
    code = run_module(WORKER, [str(question), str(answer)], folder / f"{name}.log")
    question.unlink(missing_ok=True)
    found = _read(answer, point)
    if found is not None:
        return found
    if code == -signal.SIGKILL:
        return Result("killed", "killed by the system, most likely because the host ran out of memory", {})
    return Result("killed", f"ended with exit code {code} and no result; see {folder / name}.log", {})


def run_module(command: Sequence[str], arguments: Sequence[str], log_file: Path) -> int:
    """Run a command of forebay's own in another process and return its exit code, negative for a signal.

    Raises:
        KeyboardInterrupt: if the process was interrupted.
    """
    # This very forebay, wherever this process found it.
    paths = [str(Path(forebay.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with log_file.open("w") as log:
        done = subprocess.run([*command, *arguments], stdout=log, stderr=log, env=environment, check=False)
    if done.returncode in (-signal.SIGINT, 128 + signal.SIGINT):
        raise KeyboardInterrupt
    return done.returncode


def _read(answer: Path, point: Point) -> Result | None:
    try:
        found = json.loads(answer.read_text())
    except (OSError, ValueError):
        return None
    if found.get("key") != point.key:
        return None
    return Result(found["status"], found["error"], found["data"])


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file in one go: a reader finds the old one or the new one, never a part."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    temporary.replace(path)
