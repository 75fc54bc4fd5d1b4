"""A trace of what happens on each lane, for https://ui.perfetto.dev or ``chrome://tracing``."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import forebay
from forebay.engine import Engine, Lane, get_engine
from forebay.report.recorder import Recorder, Recording

if TYPE_CHECKING:
    from forebay.config.resolve import Resolved
    from forebay.train.trainer import Trainer

_ROWS = {
    Lane.COMPUTE: (1, "compute"),
    Lane.DOWN: (2, "down: device to host"),
    Lane.HOST: (3, "host update"),
    Lane.UP: (4, "up: host to device"),
}
_STEP_ROW = (0, "step")
NUM_TRACED_STEPS = 3
NUM_WARMUP_STEPS = 5
"""Steps before the recorded ones: the first allocates, two more are needed to learn when memory is free."""


@contextlib.contextmanager
def trace(path: str | os.PathLike[str], *, engine: Engine | None = None) -> Iterator[Recorder]:
    """Write a trace of everything in the block, in the format of Chrome and Perfetto.

    It has a row for each lane: what the compute lane does (forward and backward of each layer, recomputation,
    ``step()``, updates on the device), and every copy and host task, named by the parameters it is for. A wait that
    held a lane up is a slice that says how long and for what. Counters show the memory of each tier by purpose.

    All lanes are drained before and after the block. In the block, only timing events are added; nothing waits.

    Args:
        path: the .json file to write. Nothing is written when the block raises.
        engine: what to trace. Default: the process's engine for the GPU if there is one, else for the CPU; it is what
            optimizers use that were given none. For others, ``optimizer.engine``.

    Yields:
        The recorder. Its ``mark_step()`` marks the boundary of two steps: with two marks or more, the trace is of what
        happened between the last two. Its ``recording`` has the figures after the block.

    Raises:
        ValueError: if the engine is being traced already.
        FileNotFoundError: if the folder of ``path`` does not exist.
    """
    path = Path(path)
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"trace file {path}: the folder {path.absolute().parent} does not exist")
    if engine is None:
        engine = get_engine("cuda" if torch.cuda.is_available() else "cpu")
    recorder = Recorder(engine)
    with recorder():
        yield recorder
    assert recorder.recording is not None
    write_chrome_trace(path, recorder.recording, engine)


def write_chrome_trace(path: Path, recording: Recording, engine: Engine) -> None:
    """Write a recording as Chrome's trace event format, times in microseconds from the begin of the window."""
    begin_ms, end_ms = recording.window_ms

    def microseconds(at_ms: float) -> float:
        return round(1000 * (at_ms - begin_ms), 3)

    events: list[dict[str, Any]] = [_meta("process_name", 0, {"name": f"forebay on {engine.device}"})]
    for row, name in (_STEP_ROW, *_ROWS.values()):
        events += [_meta("thread_name", row, {"name": name}), _meta("thread_sort_index", row, {"sort_index": row})]
    whole = {"ph": "X", "pid": 1, "tid": _STEP_ROW[0], "name": "traced", "cat": "step", "ts": 0.0}
    events.append(whole | {"dur": microseconds(end_ms)})
    for piece in recording.slices:
        args: dict[str, Any] = {}
        if piece.num_bytes:
            args = {"num_bytes": piece.num_bytes, "gb_per_s": piece.num_bytes / max(piece.duration_ms, 1e-6) / 1e6}
        if piece.kind == "wait":
            args = {"waited_ms": piece.duration_ms}
            if piece.lane_waited_for is not None:
                args["lane_waited_for"] = piece.lane_waited_for.value
        event = {"ph": "X", "pid": 1, "tid": _ROWS[piece.lane][0], "name": piece.name, "cat": piece.kind}
        if piece.kind == "wait":
            event["cname"] = "terrible"  # red in Chrome's viewer
        events.append(
            event | {"ts": microseconds(piece.begin_ms), "dur": round(1000 * piece.duration_ms, 3), "args": args}
        )
    # A purpose that is empty for a while must fall to zero, not end.
    purposes = {
        tier: sorted({purpose for sample in recording.memory for purpose in sample.tiers.get(tier, {})})
        for tier in ("device", "pinned", "pageable")
    }
    for sample in recording.memory:
        counter = {"ph": "C", "pid": 1, "ts": microseconds(sample.at_ms)}
        for tier, names in purposes.items():
            if names:
                held = sample.tiers.get(tier, {})
                events.append(counter | {"name": f"{tier} bytes", "args": {name: held.get(name, 0) for name in names}})
        if sample.allocated_bytes is not None:
            events.append(counter | {"name": "device bytes, all", "args": {"allocated": sample.allocated_bytes}})
    about = {"forebay": forebay.__version__, "torch": torch.__version__, "engine": engine.kind}
    if engine.kind == "sim":
        about["note"] = "on the simulator the lanes take turns on one CPU: nothing overlaps"
    data = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    temporary.write_text(json.dumps(data))
    temporary.replace(path)


def _meta(name: str, row: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": row, "name": name, "args": args}


def trace_run(resolved: Resolved, path: Path, *, num_warmup_steps: int = NUM_WARMUP_STEPS) -> Recording:
    """Train a few steps of a run and write a trace of one steady step.

    The step before it and the one after it are recorded too, so that updates which reach into the next step are whole;
    of these, what overlaps with the traced step is shown.

    Args:
        resolved: what to train. Nothing is evaluated or saved.
        path: the .json file to write.
        num_warmup_steps: trained before anything is recorded.

    Returns:
        What was recorded.
    """
    from forebay.train.trainer import Trainer

    with Trainer(resolved.config) as trainer:
        for _ in range(num_warmup_steps):
            trainer.train_step()
        return trace_steps(trainer, path)


def trace_steps(trainer: Trainer, path: Path) -> Recording:
    """Train three steps and write a trace of the second; return what was recorded.

    The third only completes the second, whose updates reach into it.
    """
    with trace(path, engine=trainer.engine) as recorder:
        trainer.train_step()
        recorder.mark_step()
        trainer.train_step()
        recorder.mark_step()
        trainer.train_step()
    assert recorder.recording is not None
    return recorder.recording
