"""What a run prints: one live line on a terminal, one plain line a step everywhere else."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TextIO

from forebay.train.metrics import StepMetrics


def size(num_bytes: float) -> str:
    """Return bytes as GiB, or as MiB below a tenth of one."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.1f} MiB"


def step_line(metrics: StepMetrics, total_steps: int) -> str:
    """Return one step as text, the figures people look at first in front."""
    m = metrics
    if m.device_total_gib is None:
        device = f"device tier {size(m.device_allocated_gib * 2**30)}"
    else:
        used = f"{m.device_allocated_gib:.2f}/{m.device_reserved_gib:.2f} GiB"
        device = f"gpu {used} {100 * m.device_reserved_gib / m.device_total_gib:.0f}%"
    parts = [
        f"step {m.step}/{total_steps}",
        f"loss {m.loss:.4f}",
        f"norm {m.grad_norm:.3f}",
        f"lr {m.lr:.2e}",
        f"{m.tokens_per_s:,.0f} tok/s",
        f"{m.step_ms:.0f} ms",
        device,
        f"host {size(m.host_rss_gib * 2**30)}",
        f"pinned {size(m.pinned_gib * 2**30)}",
    ]
    if m.down_gbps is not None or m.up_gbps is not None:
        parts.append(f"down {m.down_gbps or 0:.1f} up {m.up_gbps or 0:.1f} GB/s")
    if m.host_update_ms is not None:
        parts.append(f"host update {m.host_update_ms:.0f} ms")
    if m.stall_ms is not None:
        parts.append(f"stall {m.stall_ms:.0f} ms")
    return " | ".join(parts)


class Progress:
    """Prints to a stream and a log file.

    Args:
        total_steps: the last step's number.
        log_interval: steps between two lines; the last step always gets one.
        mode: one line that is redrawn (``"live"``), one line a step (``"plain"``), nothing at all (``"none"``), or
            live on a terminal and else plain (``"auto"``, default).
        log_file: gets every plain line. Default None: no file.
        stream: default standard output.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        log_interval: int = 1,
        mode: Literal["auto", "live", "plain", "none"] = "auto",
        log_file: Path | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._total_steps = total_steps
        self._log_interval = log_interval
        self._log = None if log_file is None else log_file.open("a", buffering=1)
        self._stream = sys.stdout if stream is None else stream
        self._is_live = mode == "live" or (mode == "auto" and self._stream.isatty())
        self._is_silent = mode == "none"
        self._live_length = 0

    def step(self, metrics: StepMetrics) -> None:
        """Show a step."""
        if metrics.step % self._log_interval and metrics.step != self._total_steps:
            return
        line = step_line(metrics, self._total_steps)
        if self._log is not None:
            self._log.write(line + "\n")
        if not self._is_live:
            self._print(line)
            return
        # One column less than there are: a full line makes some terminals scroll.
        shown = line[: shutil.get_terminal_size().columns - 1]
        self._stream.write("\r" + shown.ljust(self._live_length))
        self._stream.flush()
        self._live_length = len(shown)

    def note(self, *lines: str) -> None:
        """Print lines that stay."""
        self._end_live_line()
        for line in lines:
            self._print(line)
            if self._log is not None:
                self._log.write(line + "\n")

    def close(self) -> None:
        """End the live line and close the log file."""
        self._end_live_line()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _print(self, line: str) -> None:
        if not self._is_silent:
            print(line, file=self._stream, flush=True)

    def _end_live_line(self) -> None:
        if self._live_length:
            self._stream.write("\n")
            self._stream.flush()
            self._live_length = 0


def table(rows: Sequence[tuple[str, str]], title: str) -> list[str]:
    """Return ``rows`` of name and value as aligned lines under a title."""
    width = max(len(name) for name, _ in rows)
    return [title, *(f"  {name.ljust(width)}  {value}" for name, value in rows)]
