"""``memory.json`` in a run's folder: what the run holds now, for ``forebay memory`` in another terminal."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import torch

from forebay.engine import Engine
from forebay.host.ledger import Tier

NAME = "memory.json"
_INTERVAL_S = 1.0


class MemoryFile:
    """Writes the ledger to a file, at most once a second, so that it costs a run nothing to speak of.

    Args:
        folder: of the run.
        engine: whose ledger it is.
        total_steps: the last step's number.
    """

    def __init__(self, folder: Path, engine: Engine, total_steps: int) -> None:
        self._file = folder / NAME
        self._engine = engine
        self._total_steps = total_steps
        self._process = psutil.Process()
        self._written_s = -_INTERVAL_S
        self._ended = False

    def update(self, step: int) -> None:
        """Write what is held now, unless that was done within the last second."""
        now_s = time.monotonic()
        if now_s - self._written_s >= _INTERVAL_S:
            self._written_s = now_s
            self._write(step)

    def end(self, step: int) -> None:
        """Write what is held at the end, and that it is the end. May be called twice."""
        if not self._ended:
            self._ended = True
            self._write(step)

    def _write(self, step: int) -> None:
        engine = self._engine
        allocated = reserved = total = None
        if engine.device.type == "cuda":
            allocated = torch.cuda.memory_allocated(engine.device)
            reserved = torch.cuda.memory_reserved(engine.device)
            total = torch.cuda.get_device_properties(engine.device).total_memory
        content = {
            "pid": os.getpid(),
            "started_s": self._process.create_time(),
            "written_s": time.time(),
            "ended": self._ended,
            "step": step,
            "total_steps": self._total_steps,
            "device": str(engine.device),
            "tiers": engine.ledger.snapshot(),
            "peak_bytes": {tier.value: engine.ledger.peak_bytes(tier) for tier in Tier},
            "device_allocated_bytes": allocated,
            "device_reserved_bytes": reserved,
            "device_total_bytes": total,
            "host_rss_bytes": self._process.memory_info().rss,
        }
        # In one go: a reader finds the old file or the new one, never a part.
        temporary = self._file.with_name(f"{NAME}.tmp-{os.getpid()}")
        temporary.write_text(json.dumps(content))
        temporary.replace(self._file)
