"""Measures one point in this process: ``python -m forebay.report.worker POINT.json RESULT.json``."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

import forebay
from forebay.config.resolve import resolve
from forebay.engine.base import SIDE_LANES
from forebay.host import HostMemoryError, affinity, kernels
from forebay.host.ledger import Tier
from forebay.optim.layout import Placement
from forebay.report.digests import state_digests, tensor_digest
from forebay.report.points import Point, write_json
from forebay.report.trace import NUM_TRACED_STEPS, trace_steps
from forebay.train.memory import DoesNotFitError
from forebay.train.optimizers import effective_fraction
from forebay.train.state import make_deterministic
from forebay.train.trainer import Trainer

NUM_UNTIMED_STEPS = 3
"""Between the compared and the timed steps: after a disturbed step, memory is learned anew in two."""


def measure(point: Point, folder: Path) -> dict[str, Any]:
    """Train the point's run and return what was measured.

    Args:
        point: what to run.
        folder: for the files of the run and the trace of its last steps.

    Returns:
        ``losses`` and ``grad_norms`` of the compared steps; ``weight_digests``, by parameter after each of them, and
        ``state_digests`` after the last; ``step_ms`` of the timed steps, ``median_step_ms``, and the ``stall_share`` of
        that time; ``busy_ms`` by lane in one traced step and what it moved: ``down_bytes``, ``up_bytes``,
        ``num_host_elements``; ``device_peak_bytes`` while timed; ``held`` and ``plan``, bytes by tier and purpose,
        measured between two steps and predicted; ``allocated_bytes`` on the GPU then, None without one;
        ``host_rss_bytes``; ``optimizer_device_bytes`` and ``optimizer_device_bytes_without_offload``, predicted;
        ``about``, the machine and versions.
    """
    resolved = resolve(point.recipe, point.words)
    config = resolved.config
    config.logger.output_dir = str(folder)
    config.logger.tensorboard = False
    config.logger.progress = "none"
    config.checkpoint.save = config.checkpoint.save_interval = None
    folder.mkdir(parents=True, exist_ok=True)
    if point.deterministic:
        # Before the first use of CUDA, see make_deterministic.
        make_deterministic()
    with Trainer(config) as trainer:
        result = _compared_steps(trainer, point)
        # Time is measured with the kernels that training uses.
        torch.use_deterministic_algorithms(config.train.deterministic)
        result |= _timed_steps(trainer, point.num_timed_steps)
        result |= _memory(trainer)
        result |= _traced_step(trainer, folder / "step.json")
        result["about"] = _about(trainer)
    return result


def _compared_steps(trainer: Trainer, point: Point) -> dict[str, Any]:
    names = [(name, param) for name, param in trainer.model.named_parameters() if param.requires_grad]
    digests = []
    for _ in range(point.num_steps):
        trainer.train_step()
        if point.digests:
            _synchronize(trainer.optimizer)
            digests.append({name: tensor_digest(param) for name, param in names})
    finished = trainer.finished_steps()
    if point.save_weights is not None:
        _synchronize(trainer.optimizer)
        torch.save({name: param.detach().cpu() for name, param in names}, point.save_weights)
    return {
        "losses": [loss for _, loss, _, _ in finished],
        "grad_norms": [norm for _, _, norm, _ in finished],
        "weight_digests": digests,
        "state_digests": state_digests(trainer.optimizer) if point.digests else {},
    }


def _synchronize(optimizer: Any) -> None:
    # Weights are read outside of a forward that would wait for their updates.
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()


def _timed_steps(trainer: Trainer, num_steps: int) -> dict[str, Any]:
    for _ in range(NUM_UNTIMED_STEPS):
        trainer.train_step()
    before = trainer.finished_steps()[-1][3]
    stalled_before_ms = trainer.engine.traffic().stall_ms
    trainer.engine.ledger.reset_peak()
    if trainer.engine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(trainer.engine.device)
    times = []
    for _ in range(num_steps):
        trainer.train_step()
        # One step behind, as in training: the device must not wait for Python here either.
        times += [finished for _, _, _, finished in trainer.finished_steps(keep=1)]
    times += [finished for _, _, _, finished in trainer.finished_steps()]
    trainer.engine.synchronize()
    stalled_ms = trainer.engine.traffic().stall_ms - stalled_before_ms
    step_ms = [1000 * (end - begin) for begin, end in zip([before, *times], times, strict=False)]
    if trainer.engine.device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(trainer.engine.device)
    else:
        peak_bytes = trainer.engine.ledger.peak_bytes(Tier.DEVICE)
    return {
        "step_ms": step_ms,
        "median_step_ms": statistics.median(step_ms),
        "device_peak_bytes": peak_bytes,
        "stall_share": stalled_ms / sum(step_ms),
    }


def _memory(trainer: Trainer) -> dict[str, Any]:
    engine, prepared = trainer.engine, trainer.prepared
    engine.synchronize()
    on_cuda = engine.device.type == "cuda"
    return {
        "held": engine.ledger.snapshot(),
        "plan": prepared.plan,
        "allocated_bytes": torch.cuda.memory_allocated(engine.device) if on_cuda else None,
        "host_rss_bytes": psutil.Process().memory_info().rss,
        "optimizer_device_bytes": prepared.optimizer_device_bytes,
        "optimizer_device_bytes_without_offload": prepared.optimizer_device_bytes_without_offload,
    }


def _traced_step(trainer: Trainer, path: Path) -> dict[str, Any]:
    before = trainer.engine.traffic()
    recording = trace_steps(trainer, path)
    after = trainer.engine.traffic()
    step_ms = recording.window_ms[1] - recording.window_ms[0]
    # The simulator adds up no stalls of its own; a GPU's engine does, over all timed steps and with no trace beside it.
    stalls = {"stall_share": recording.stall_ms() / step_ms} if trainer.engine.kind == "sim" else {}
    placed = getattr(trainer.optimizer, "placed", None)
    host_chunks = [] if placed is None else placed.shares[Placement.HOST].chunks
    return {
        **stalls,
        "busy_ms": {lane.value: recording.busy_ms(lane) for lane in SIDE_LANES},
        "down_bytes": (after.down_bytes - before.down_bytes) // NUM_TRACED_STEPS,
        "up_bytes": (after.up_bytes - before.up_bytes) // NUM_TRACED_STEPS,
        "num_host_elements": sum(state.chunk.num_elements for state in host_chunks),
    }


def _about(trainer: Trainer) -> dict[str, Any]:
    config, prepared = trainer.config, trainer.prepared
    device = prepared.device
    name, total_bytes = "cpu", None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, total_bytes = properties.name, properties.total_memory
    return {
        "device": name,
        "device_total_bytes": total_bytes,
        "host_cores": len(affinity()),
        "host_total_bytes": psutil.virtual_memory().total,
        "host_kernel": kernels.backend(),
        "engine": trainer.engine.kind,
        "python": platform.python_version(),
        "versions": {
            "forebay": forebay.__version__,
            "torch": torch.__version__,
            "transformers": metadata.version("transformers"),
        },
        "model": prepared.hf_config.model_type,
        "num_parameters": prepared.num_parameters,
        "dtype": str(prepared.dtype).removeprefix("torch."),
        "tokens_per_step": config.train.global_batch_size * config.dataset.seq_length,
        "offload_fraction": effective_fraction(config.optimizer),
        "optimizer": type(trainer.optimizer).__name__,
        "num_optimizer_elements": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
    }


def main(argv: list[str]) -> int:
    """Measure what the first file asks for and write the answer to the second."""
    question, answer = (Path(word) for word in argv)
    asked = json.loads(question.read_text())
    folder, key = Path(asked.pop("folder")), asked.pop("key")
    point = Point(**asked | {"words": tuple(asked["words"])})
    status, error, data = "ok", "", {}
    try:
        data = measure(point, folder)
    except (HostMemoryError, DoesNotFitError, torch.OutOfMemoryError) as exception:
        status, error = "out_of_memory", str(exception)
    except (ValueError, FileNotFoundError) as exception:
        status, error = "refused", str(exception)
        traceback.print_exc()
    except Exception as exception:
        status, error = "failed", f"{type(exception).__name__}: {exception}"
        traceback.print_exc()
    write_json(answer, {"key": key, "status": status, "error": error, "data": data})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
