"""What a log says, whoever wrote it: the framework, the settings, step times, losses and memory errors.

Logs differ in prefixes (ranks, times, colours) and agree in the messages of torch, the drivers and the kernel, so
everything is found by searching, never by position.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Iterable

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_FRAMEWORKS = (
    # The more specific first: a trainer on DeepSpeed mentions torch's FSDP in warnings, never the other way round.
    ("forebay", re.compile(r"\bforebay(?: \d|/|\.)|this run does not fit; nothing has been allocated")),
    ("megatron", re.compile(r"megatron|elapsed time per iteration \(ms\)", re.IGNORECASE)),
    ("deepspeed", re.compile(r"deepspeed", re.IGNORECASE)),
    ("fsdp", re.compile(r"\bfsdp\b|fully_shard|FullyShardedDataParallel|_fsdp_", re.IGNORECASE)),
)
_SETTINGS = (
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "cpu_offloading",
    "cpu_offloading_num_layers",
    "fine_grained_activation_offloading",
    "pipeline_model_parallel_size",
    "recompute_granularity",
)
# `model.cpu_offloading=True`, `cpu_offloading: true`, `cpu_offloading ......... True`
_SETTING = re.compile(rf"(?<![\w])({'|'.join(_SETTINGS)})(?![\w])[\"']?\s*(?:[.:=]+\s*|\s)[\"']?([\w.+-]+)")
# `--optimizer-offload-fraction 0.5`, `--cpu-offloading`
_FLAG = re.compile(rf"--({'|'.join(name.replace('_', '-') for name in _SETTINGS)})(?![\w-])(?:[= ]([\w.]+))?")
_DEEPSPEED_OFFLOAD = re.compile(
    r"offload_optimizer[\"']?\s*[.:=]+\s*.{0,80}?device[\"']?\s*[:=]\s*[\"']?\S*?(cpu|nvme)"
)
_OOM = re.compile(
    r"CUDA out of memory|HIP out of memory|OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)
_PINNING = re.compile(r"pin_memory|cudaHost(Alloc|Register)|CachingHostAllocator|pinned", re.IGNORECASE)
_STEP_MS = (
    re.compile(r"elapsed time per iteration \(ms\):\s*([\d.]+)"),
    re.compile(r"\bstep \d+/\d+ \|.*?\| ([\d.,]+) ms\b"),
    re.compile(r"\biter_ms[=: ]+([\d.]+)"),
)
_OPTIMIZER_MS = (
    re.compile(r"optimizer-inner-step[ .]*:\s*\(?([\d.]+)"),
    re.compile(r"\boptimizer_step:\s*([\d.]+)"),
    re.compile(r"^\s*optimizer[ .]*:\s*\(([\d.]+)"),
)
_AMOUNT = r"([\d.]+) ([KMG])iB"
_GIB = {"K": 2.0**-20, "M": 2.0**-10, "G": 1.0}


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a log: its number from 1, and its text without colours."""

    number: int
    text: str


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """torch's message about GPU memory that was not to be had; amounts in GiB, None where it does not say."""

    line: Line
    tried_gib: float | None
    total_gib: float | None
    allocated_gib: float | None
    unallocated_gib: float | None
    others_gib: float


@dataclasses.dataclass
class Facts:
    """What :mod:`forebay.doctor.diagnose` judges by.

    Attributes:
        lines: all of them.
        framework: ``"forebay"``, ``"megatron"``, ``"deepspeed"``, ``"fsdp"`` or ``"torch"``.
        settings: the last value that the log shows of each setting of offloading.
        out_of_memory: every GPU out-of-memory error.
        step_ms: per offload fraction (None while the log has shown none), the times of its steps.
        optimizer_ms: times of the optimizer's part of a step.
    """

    lines: list[Line]
    framework: str = "torch"
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    out_of_memory: list[OutOfMemory] = dataclasses.field(default_factory=list)
    step_ms: dict[float | None, list[float]] = dataclasses.field(default_factory=dict)
    optimizer_ms: list[float] = dataclasses.field(default_factory=list)

    def is_on(self, setting: str) -> bool:
        """Return whether the log shows a switch as on."""
        return self.settings.get(setting, "").lower() == "true"

    @property
    def fraction(self) -> float | None:
        """The offload fraction in force at the end; None where the log shows no optimizer offload."""
        if not self.is_on("optimizer_cpu_offload"):
            return None
        try:
            return float(self.settings.get("optimizer_offload_fraction", ""))
        except ValueError:
            return None

    @property
    def offloads_activations(self) -> bool:
        """Whether either kind of activation offload is on."""
        return self.is_on("cpu_offloading") or self.is_on("fine_grained_activation_offloading")

    @property
    def offloads(self) -> bool:
        """Whether anything is offloaded."""
        return self.offloads_activations or self.is_on("optimizer_cpu_offload")

    def median_step_ms(self, fraction: float | None) -> float | None:
        """Return the median time of the steps at a fraction, without the first, which allocates."""
        times = self.step_ms.get(fraction, [])
        return statistics.median(times[1:] or times) if times else None

    def find(self, pattern: re.Pattern[str]) -> list[Line]:
        """Return the lines that a pattern is found in."""
        return [line for line in self.lines if pattern.search(line.text)]


def read(lines: Iterable[str]) -> Facts:
    """Return what a log says.

    Args:
        lines: of the log, in order.
    """
    facts = Facts([Line(number, _ANSI.sub("", text).rstrip("\n")) for number, text in enumerate(lines, start=1)])
    for line in facts.lines:
        _read_settings(facts, line.text)
        for pattern in _STEP_MS:
            if match := pattern.search(line.text):
                facts.step_ms.setdefault(facts.fraction, []).append(float(match.group(1).replace(",", "")))
        facts.optimizer_ms += [float(m.group(1)) for pattern in _OPTIMIZER_MS if (m := pattern.search(line.text))]
        if _OOM.search(line.text) and not _PINNING.search(line.text):
            facts.out_of_memory.append(_read_out_of_memory(line))
    for name, pattern in _FRAMEWORKS:
        if facts.find(pattern):
            facts.framework = name
            break
    return facts


def _read_settings(facts: Facts, text: str) -> None:
    for match in _SETTING.finditer(text):
        facts.settings[match.group(1)] = match.group(2)
    for match in _FLAG.finditer(text):
        value = match.group(2)
        facts.settings[match.group(1).replace("-", "_")] = "true" if value is None or value.startswith("--") else value
    if _DEEPSPEED_OFFLOAD.search(text):
        facts.settings["optimizer_cpu_offload"] = "true"
        facts.settings.setdefault("optimizer_offload_fraction", "1.0")


def _read_out_of_memory(line: Line) -> OutOfMemory:
    def amount(pattern: str) -> float | None:
        match = re.search(pattern, line.text)
        return float(match.group(1)) * _GIB[match.group(2)] if match else None

    others = re.finditer(rf"Process \d+ has {_AMOUNT} memory in use", line.text)
    return OutOfMemory(
        line,
        tried_gib=amount(rf"Tried to allocate {_AMOUNT}"),
        total_gib=amount(rf"total capacity of {_AMOUNT}"),
        allocated_gib=amount(rf"{_AMOUNT} is allocated by PyTorch"),
        unallocated_gib=amount(rf"{_AMOUNT} is reserved by PyTorch but unallocated"),
        others_gib=sum(float(match.group(1)) * _GIB[match.group(2)] for match in others),
    )
