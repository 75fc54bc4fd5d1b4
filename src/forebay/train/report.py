"""The banner a run starts with, and the table and ``summary.json`` it ends with."""

from __future__ import annotations

import array
import dataclasses
import json
import math
import platform
import statistics
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import forebay
from forebay.config.schema import Config
from forebay.engine import Engine
from forebay.host import kernels
from forebay.train.memory import DEVICE, PAGEABLE, PINNED, Plan, host_bytes
from forebay.train.metrics import StepMetrics
from forebay.train.optimizers import effective_fraction, uses_torch_classes
from forebay.train.prepare import Prepared, num_micro_batches
from forebay.train.progress import size, table


def count(number: float) -> str:
    """Return a count as 17.5K, 3.2M or 1.10B."""
    for unit, scale, digits in (("B", 1e9, 2), ("M", 1e6, 1), ("K", 1e3, 1)):
        if number >= scale:
            return f"{number / scale:.{digits}f}{unit}"
    return f"{number:.0f}"


def banner(config: Config, prepared: Prepared, engine: Engine) -> list[str]:
    """Return what a run consists of, in under ten lines."""
    train = config.train
    accumulation = num_micro_batches(config)
    tokens = train.global_batch_size * config.dataset.seq_length
    options = config.optimizer
    fraction = effective_fraction(options)
    if uses_torch_classes(options):
        name = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}[options.optimizer]
        how = f"torch.optim.{name} in HybridDeviceOptimizer, {fraction:.0%} of the state on the host"
    elif fraction:
        how = f"forebay.AdamW, {fraction:.0%} of the state on the host, {options.optimizer_offload_placement}, overlap "
        how += "on" if options.overlap_cpu_optimizer_d2h_h2d else "off"
    else:
        how = "forebay.AdamW, all state on the device"
    start = "random weights" if config.model.path is None else f"weights from {config.model.path}"
    if prepared.resume_from is not None:
        start = f"continues {prepared.resume_from}"
    dtype = str(prepared.dtype).removeprefix("torch.")
    return [
        f"forebay {forebay.__version__} | torch {torch.__version__} | transformers "
        f"{metadata.version('transformers')} | Python {platform.python_version()}",
        f"device     {_device_name(prepared.device)} | engine {engine.kind} | host kernel {kernels.backend()}, "
        f"{kernels.num_threads()} threads",
        f"model      {prepared.hf_config.model_type}, {count(prepared.num_parameters)} parameters, {dtype}, {start}",
        f"text       {prepared.corpus.description}, unigram entropy {prepared.unigram_entropy:.3f} nats",
        f"batch      {train.micro_batch_size} (micro) x {accumulation} (accumulated) = {train.global_batch_size} "
        f"sequences x {config.dataset.seq_length} = {tokens:,} tokens a step, {train.train_iters} steps",
        f"optimizer  {how}, {_schedule(config)}",
        *_memory_lines(prepared.plan),
    ]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{device} {properties.name} {properties.total_memory / 2**30:.0f} GiB"
    return f"cpu, {torch.get_num_threads()} threads"


def _schedule(config: Config) -> str:
    options = config.optimizer
    warmup = ""
    if options.lr_warmup_iters:
        warmup = f", warm-up {options.lr_warmup_iters} steps"
        if options.lr_warmup_iters > config.train.train_iters:
            warmup += " (longer than the run)"
    return f"lr {options.lr:g} {options.lr_decay_style}{warmup}"


def _memory_lines(plan: Plan) -> list[str]:
    host = [f"{tier}: {_purposes(plan[tier])}" for tier in (PINNED, PAGEABLE) if plan.get(tier)]
    return [f"device     {_purposes(plan[DEVICE])}", "host       " + ("; ".join(host) or "nothing offloaded")]


def _purposes(purposes: Mapping[str, int]) -> str:
    return ", ".join(
        f"{purpose.replace('_', ' ')} {size(num_bytes)}" for purpose, num_bytes in purposes.items() if num_bytes
    )


class History:
    """What the summary needs to know of all steps so far; a few bytes a step."""

    def __init__(self) -> None:
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.eval_loss: float | None = None
        self.device_peak_gib = 0.0
        self.host_peak_rss_gib = 0.0
        self.pinned_peak_gib = 0.0
        self._step_ms = array.array("f")

    def add(self, metrics: StepMetrics) -> None:
        """Take in a step."""
        loss = metrics.loss if math.isfinite(metrics.loss) else None
        if not self._step_ms:
            self.first_loss = loss
        self.last_loss = loss
        self.device_peak_gib = max(self.device_peak_gib, metrics.device_peak_gib)
        self.host_peak_rss_gib = max(self.host_peak_rss_gib, metrics.host_rss_gib)
        self.pinned_peak_gib = max(self.pinned_peak_gib, metrics.pinned_gib)
        self._step_ms.append(metrics.step_ms)

    def median_step_ms(self) -> float | None:
        """Return the median step time without the first step, which allocates and compiles."""
        timed = self._step_ms[1:] or self._step_ms
        return statistics.median(timed) if timed else None


@dataclasses.dataclass
class Summary:
    """How a run went. Losses in nats; ``None`` for what was not measured."""

    steps: int
    first_step: int
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    unigram_entropy: float
    median_step_ms: float | None
    tokens_per_s: float | None
    offload_fraction: float
    optimizer_device_bytes: int
    staging_device_bytes: int
    optimizer_device_bytes_without_offload: int
    optimizer_host_bytes: int
    device_peak_gib: float
    host_peak_rss_gib: float
    pinned_peak_gib: float
    interrupted: bool

    def write(self, file: Path) -> None:
        """Write the fields as JSON."""
        file.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def lines(self) -> list[str]:
        """Return the closing table."""
        saved = self.optimizer_device_bytes_without_offload - self.optimizer_device_bytes
        rows = [
            ("loss, first and last step", f"{_number(self.first_loss)} -> {_number(self.last_loss)}"),
            ("evaluation loss", _number(self.eval_loss)),
            ("unigram entropy of the text", f"{self.unigram_entropy:.4f} (the best without context)"),
            ("tokens/s (median step)", "-" if self.tokens_per_s is None else f"{self.tokens_per_s:,.0f}"),
            (
                "optimizer state on the device tier",
                f"{size(self.optimizer_device_bytes)} at offload fraction {self.offload_fraction:g}",
            ),
            (
                "  without offload",
                f"{size(self.optimizer_device_bytes_without_offload)} (offload saves {size(saved)})",
            ),
            ("  staging while offloaded state visits", size(self.staging_device_bytes)),
            ("optimizer on the host", size(self.optimizer_host_bytes)),
            ("peak on the device tier", size(self.device_peak_gib * 2**30)),
            (
                "peak host memory",
                f"{size(self.host_peak_rss_gib * 2**30)}, of it pinned {size(self.pinned_peak_gib * 2**30)}",
            ),
        ]
        return table(rows, f"steps {self.first_step} to {self.steps}")


def summarize(
    config: Config, prepared: Prepared, history: History, *, first_step: int, last_step: int, interrupted: bool
) -> Summary:
    """Return how a run went."""
    step_ms = history.median_step_ms()
    num_tokens = config.train.global_batch_size * config.dataset.seq_length
    return Summary(
        steps=last_step,
        first_step=first_step,
        first_loss=history.first_loss,
        last_loss=history.last_loss,
        eval_loss=history.eval_loss,
        unigram_entropy=prepared.unigram_entropy,
        median_step_ms=step_ms,
        tokens_per_s=None if step_ms is None else 1000 * num_tokens / step_ms,
        offload_fraction=effective_fraction(config.optimizer),
        optimizer_device_bytes=prepared.optimizer_device_bytes,
        staging_device_bytes=prepared.staging_device_bytes,
        optimizer_device_bytes_without_offload=prepared.optimizer_device_bytes_without_offload,
        optimizer_host_bytes=host_bytes(prepared.plan),
        device_peak_gib=history.device_peak_gib,
        host_peak_rss_gib=history.host_peak_rss_gib,
        pinned_peak_gib=history.pinned_peak_gib,
        interrupted=interrupted,
    )


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4f}"
