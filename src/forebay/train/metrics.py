"""What a step reports: collected without waiting for the device, written as JSON lines and to TensorBoard."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import psutil
import torch

from forebay.engine import Engine, Event, Lane
from forebay.host.ledger import Tier

_GIB = 2**30


@dataclasses.dataclass
class StepMetrics:
    """One step. Memory in GiB, transfer rates in GB/s (None where nothing was measured).

    ``step`` counts from 1. ``loss`` is the mean over the tokens of the global batch, in nats. The device
    figures of an engine without a GPU are what its ledger says the device tier would hold.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    step_ms: float
    device_allocated_gib: float
    device_reserved_gib: float
    device_peak_gib: float
    device_total_gib: float | None
    host_rss_gib: float
    pinned_gib: float
    down_gbps: float | None = None
    up_gbps: float | None = None
    host_update_ms: float | None = None
    stall_ms: float | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the loss and the gradient norm are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def as_json(self) -> dict[str, Any]:
        """Return the fields; what is not finite as None, since JSON has no NaN."""
        fields = dataclasses.asdict(self)
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in fields.items()
        }


class MemoryMeter:
    """Memory in use on both tiers; reading it never waits for the device."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._process = psutil.Process()
        self._total_bytes: int | None = None
        engine.ledger.reset_peak()
        if engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(engine.device)
            self._total_bytes = torch.cuda.get_device_properties(engine.device).total_memory

    def read(self) -> dict[str, Any]:
        """Return the memory fields of :class:`StepMetrics`."""
        ledger = self._engine.ledger
        if self._engine.device.type == "cuda":
            device = self._engine.device
            allocated = torch.cuda.memory_allocated(device)
            reserved = torch.cuda.memory_reserved(device)
            peak = torch.cuda.max_memory_allocated(device)
        else:
            allocated = reserved = ledger.num_bytes(Tier.DEVICE)
            peak = ledger.peak_bytes(Tier.DEVICE)
        return {
            "device_allocated_gib": allocated / _GIB,
            "device_reserved_gib": reserved / _GIB,
            "device_peak_gib": peak / _GIB,
            "device_total_gib": None if self._total_bytes is None else self._total_bytes / _GIB,
            "host_rss_gib": self._process.memory_info().rss / _GIB,
            "pinned_gib": ledger.num_bytes(Tier.PINNED) / _GIB,
        }


class DeferredScalars:
    """Numbers on the device, read a step late so that Python never waits for the step it has just queued."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending: deque[tuple[int, torch.Tensor, Event, float]] = deque()
        self._free: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._pending)

    def push(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Queue the numbers of ``step`` behind the work enqueued so far; both are of one element."""
        values = torch.stack([loss.detach().float().reshape(()), grad_norm.detach().float().reshape(())])
        on_cuda = values.device.type == "cuda"
        target = self._free.pop() if self._free else torch.empty(2, pin_memory=on_cuda)
        # On the compute lane itself: behind the copies of a side lane it would come out later still.
        target.copy_(values, non_blocking=True)
        # Without the event the pinned memory would be read before the copy has been done.
        self._pending.append((step, target, self._engine.record(Lane.COMPUTE), time.perf_counter()))

    def pop(self) -> tuple[int, float, float, float]:
        """Wait for the oldest pending step.

        Returns:
            Step, loss, gradient norm, and when the step finished on ``time.perf_counter()``'s clock: now if
            this had to wait for the device, else when the step had been queued, the closest known time.
        """
        step, target, event, finished = self._pending.popleft()
        if not event.query():
            event.synchronize()
            finished = time.perf_counter()
        loss, grad_norm = target.tolist()
        self._free.append(target)
        return step, loss, grad_norm, finished


class MetricsLog:
    """``metrics.jsonl``, and TensorBoard if it is installed.

    Args:
        folder: where to write.
        first_step: the first step that will be logged; later ones left by an earlier run that this one goes
            back behind are dropped.
        tensorboard: also write TensorBoard event files, if it is installed.
    """

    def __init__(self, folder: Path, *, first_step: int, tensorboard: bool) -> None:
        self.file = folder / "metrics.jsonl"
        _drop_steps_from(self.file, first_step)
        self._stream = self.file.open("a", buffering=1)
        self._writer = _summary_writer(folder, first_step) if tensorboard else None

    def write(self, metrics: StepMetrics) -> None:
        """Append one step."""
        record = metrics.as_json()
        self._stream.write(json.dumps(record) + "\n")
        if self._writer is not None:
            for key, value in record.items():
                if key != "step" and value is not None:
                    self._writer.add_scalar(key, value, metrics.step)

    def write_eval(self, step: int, loss: float) -> None:
        """Append an evaluation, as an object with ``step`` and ``eval_loss``."""
        self._stream.write(json.dumps({"step": step, "eval_loss": loss}) + "\n")
        if self._writer is not None:
            self._writer.add_scalar("eval_loss", loss, step)

    def close(self) -> None:
        """Flush and close."""
        self._stream.close()
        if self._writer is not None:
            self._writer.close()


def _drop_steps_from(file: Path, first_step: int) -> None:
    if not file.exists():
        return
    kept = []
    for line in file.read_text().splitlines():
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue  # cut short by a kill
        if step < first_step:
            kept.append(line)
    temporary = file.with_name(f"{file.name}.tmp-{os.getpid()}")
    temporary.write_text("".join(line + "\n" for line in kept))
    temporary.replace(file)


def _summary_writer(folder: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
