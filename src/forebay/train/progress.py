"""What a run prints: one live line on a terminal, one plain line a step everywhere else."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from forebay.train.metrics import StepMetrics


def step_line(metrics: StepMetrics, total_steps: int) -> str:
    """Return one step as text, the figures people look at first in front."""
    m = metrics
    device = f"{m.device_allocated_gib:.2f}/{m.device_reserved_gib:.2f} GiB"
    if m.device_total_gib is not None:
        device = f"gpu {device} {100 * m.device_reserved_gib / m.device_total_gib:.0f}%"
    else:
        device = f"device {device}"
    parts = [
        f"step {m.step}/{total_steps}",
        f"loss {m.loss:.4f}",
        f"norm {m.grad_norm:.3f}",
        f"lr {m.lr:.2e}",
        f"{m.tokens_per_s:,.0f} tok/s",
        f"{m.step_ms:.0f} ms",
        device,
        f"host {m.host_rss_gib:.2f} GiB",
        f"pinned {m.pinned_gib:.2f} GiB",
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
        log_file: gets every plain line. Default None: no file.
        stream: default standard output. A terminal gets one line that is redrawn, anything else plain lines.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        log_interval: int = 1,
        log_file: Path | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._total_steps = total_steps
        self._log_interval = log_interval
        self._log = None if log_file is None else log_file.open("a", buffering=1)
        self._stream = sys.stdout if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._live_length = 0

    def step(self, metrics: StepMetrics) -> None:
        """Show a step."""
        if metrics.step % self._log_interval and metrics.step != self._total_steps:
            return
        line = step_line(metrics, self._total_steps)
        if self._log is not None:
            self._log.write(line + "\n")
        if not self._is_terminal:
            print(line, file=self._stream, flush=True)
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
            print(line, file=self._stream, flush=True)
            if self._log is not None:
                self._log.write(line + "\n")

    def close(self) -> None:
        """End the live line and close the log file."""
        self._end_live_line()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _end_live_line(self) -> None:
        if self._live_length:
            self._stream.write("\n")
            self._stream.flush()
            self._live_length = 0


def table(rows: Sequence[tuple[str, str]], title: str) -> list[str]:
    """Return ``rows`` of name and value as aligned lines under a title."""
    width = max(len(name) for name, _ in rows)
    return [title, *(f"  {name.ljust(width)}  {value}" for name, value in rows)]
