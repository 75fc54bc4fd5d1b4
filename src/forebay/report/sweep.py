"""One run at several fractions, each measured in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forebay.report.points import Point, Result, run_module, run_point, write_json
from forebay.report.verify import NO_OFFLOAD, saved_bytes


@dataclasses.dataclass(frozen=True)
class SweepPoint:
    """One fraction and what it gave.

    Attributes:
        fraction: share of the optimizer state on the host.
        result: as measured.
    """

    fraction: float
    result: Result

    @property
    def ok(self) -> bool:
        """Whether there are measurements."""
        return self.result.status == "ok"

    @property
    def label(self) -> str:
        """The fraction in percent."""
        return f"{100 * self.fraction:g}%"


@dataclasses.dataclass
class Sweep:
    """What :func:`sweep` measured.

    Attributes:
        recipe: that was run.
        words: the overrides of all points.
        points: in the order of their fractions.
        ceilings: see :func:`forebay.report.ceilings.measure_ceilings`; empty when no point ran.
    """

    recipe: str
    words: list[str]
    points: list[SweepPoint]
    ceilings: dict[str, float]

    @property
    def reference(self) -> SweepPoint | None:
        """The point with least offloading that ran; others are compared with it."""
        return next((point for point in self.points if point.ok), None)

    @property
    def failed(self) -> list[SweepPoint]:
        """The points that ended otherwise than measured or out of memory."""
        return [point for point in self.points if point.result.status not in ("ok", "out_of_memory")]


def parse_fractions(text: str) -> list[float]:
    """Return the numbers of a list such as ``0,0.25,1``, in order, each once.

    Raises:
        ValueError: for what is no number from 0 to 1.
    """
    fractions = set()
    for word in text.split(","):
        try:
            value = float(word)
        except ValueError:
            value = -1.0
        if not 0.0 <= value <= 1.0:
            raise ValueError(
                f"--fractions {text}: {word!r} is no number from 0 to 1; write for example 0,0.25,0.5,0.75,1"
            )
        fractions.add(value)
    return sorted(fractions)


def sweep(
    recipe: str,
    words: Sequence[str],
    fractions: Sequence[float],
    folder: Path,
    *,
    num_steps: int,
    num_timed_steps: int,
    say: Callable[[str], object] = lambda line: None,
) -> Sweep:
    """Measure a recipe at each fraction; what an earlier, interrupted call measured is taken up.

    Args:
        recipe: its name, or a file.
        words: overrides of all points.
        fractions: in ascending order.
        folder: gets the results and logs of the points, their traces and ``sweep.json``; it exists.
        num_steps: whose losses are compared.
        num_timed_steps: whose time and memory are measured.
        say: is told what is going on.
    """
    points = []
    for fraction in fractions:
        say(f"fraction {fraction:g}: {num_steps} and {num_timed_steps} timed steps ...")
        point = Point(recipe, (*words, *_words_of(fraction)), num_steps, num_timed_steps)
        points.append(SweepPoint(fraction, run_point(point, folder, f"fraction_{fraction:g}")))
        result = points[-1].result
        done = f"{result.data['median_step_ms']:.1f} ms a step" if points[-1].ok else result.status.replace("_", " ")
        say(f"fraction {fraction:g}: {done}")
    found = Sweep(recipe, list(words), points, {})
    if found.reference is not None:
        say("the ceilings of this machine ...")
        found.ceilings = _ceilings(found.reference.result.data["about"], folder)
    write_json(folder / "sweep.json", as_json(found))
    return found


def _words_of(fraction: float) -> Sequence[str]:
    if fraction == 0:
        return NO_OFFLOAD
    return ("optimizer.optimizer_cpu_offload=True", f"optimizer.optimizer_offload_fraction={fraction!r}")


def _ceilings(about: dict[str, Any], folder: Path) -> dict[str, float]:
    file = folder / f"ceilings_{about['engine']}_{about['dtype']}.json"
    if not file.exists():
        command = [sys.executable, "-m", "forebay.report.ceilings"]
        log = folder / "ceilings.log"
        if run_module(command, [about["dtype"], str(file)], log):
            raise RuntimeError(f"measuring the ceilings of this machine failed; see {log}")
    return json.loads(file.read_text())


def row(point: SweepPoint, reference: SweepPoint | None) -> dict[str, Any]:
    """Return a point's line of the table; None for what was not measured."""
    values: dict[str, Any] = {"fraction": point.fraction, "status": point.result.status}
    columns = (
        "iter_ms", "slowdown", "stall_share", "peak_bytes", "held_bytes", "saved_bytes", "host_bytes", "down_gbps",
        "up_gbps", "update_gparams", "last_loss", "loss_match",
    )  # fmt: skip
    values |= dict.fromkeys(columns)
    if not point.ok or reference is None:
        return values
    data, base = point.result.data, reference.result.data
    held = data["held"]["device"]
    deltas = [abs(x - y) for x, y in zip(base["losses"], data["losses"], strict=True)]
    return values | {
        "iter_ms": data["median_step_ms"],
        "slowdown": data["median_step_ms"] / base["median_step_ms"],
        "stall_share": data["stall_share"],
        "peak_bytes": data["device_peak_bytes"],
        "held_bytes": sum(held.values()) if data["allocated_bytes"] is None else data["allocated_bytes"],
        "saved_bytes": saved_bytes(base, data),
        "host_bytes": sum(sum(data["held"][tier].values()) for tier in ("pinned", "pageable")),
        **rates(point),
        "last_loss": data["losses"][-1],
        "loss_match": "bitwise" if base["losses"] == data["losses"] else f"max delta {max(deltas):.2g}",
    }


def rates(point: SweepPoint) -> dict[str, float | None]:
    """Return how fast the lanes of a point were while they worked; None for one that did not."""
    data = point.result.data
    busy = data["busy_ms"]

    def rate(amount: float, lane: str) -> float | None:
        return amount / busy[lane] / 1e6 if busy[lane] > 0 and amount else None

    return {
        "down_gbps": rate(data["down_bytes"], "down"),
        "up_gbps": rate(data["up_bytes"], "up"),
        "update_gparams": rate(data["num_host_elements"], "host"),
    }


def as_json(found: Sweep) -> dict[str, Any]:
    """Return a sweep's figures as plain data."""
    rows = [row(point, found.reference) for point in found.points]
    errors = {point.label: point.result.error for point in found.points if point.result.error}
    about = found.reference.result.data["about"] if found.reference is not None else None
    return {
        "recipe": found.recipe,
        "overrides": found.words,
        "about": about,
        "ceilings": found.ceilings,
        "points": rows,
        "errors": errors,
    }


TABLE_COLUMNS = {
    "fraction": ("fraction", "{:g}", 1.0),
    "status": ("status", "{}", None),
    "iter_ms": ("ms/step", "{:.1f}", 1.0),
    "slowdown": ("slowdown", "{:.2f}", 1.0),
    "stall_share": ("stalled %", "{:.1f}", 100.0),
    "peak_bytes": ("peak GiB", "{:.3f}", 2.0**-30),
    "saved_bytes": ("saved GiB", "{:.3f}", 2.0**-30),
    "host_bytes": ("host GiB", "{:.3f}", 2.0**-30),
    "down_gbps": ("down GB/s", "{:.1f}", 1.0),
    "up_gbps": ("up GB/s", "{:.1f}", 1.0),
    "update_gparams": ("update G/s", "{:.2f}", 1.0),
    "last_loss": ("last loss", "{:.4f}", 1.0),
    "loss_match": ("loss", "{}", None),
}
"""By key of :func:`row`: heading, format, and what the value is multiplied by."""


def cells(values: dict[str, Any]) -> list[str]:
    """Return a row as text, a dash where there is no value."""
    result = []
    for key, (_, form, factor) in TABLE_COLUMNS.items():
        value = values[key]
        if isinstance(value, str):
            value = value.replace("_", " ")
        result.append("-" if value is None else form.format(value if factor is None else factor * value))
    return result


def table(found: Sweep) -> list[str]:
    """Return the points as aligned lines under their headings."""
    rows = [[heading for heading, _, _ in TABLE_COLUMNS.values()]]
    rows += [cells(row(point, found.reference)) for point in found.points]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in rows]
