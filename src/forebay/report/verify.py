"""Proof that offloading changes a run's memory and nothing else: a run with it and one without, apart, compared."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forebay.report.points import Point, Result, run_point

if TYPE_CHECKING:
    from forebay.config.schema import Config

NO_OFFLOAD = (
    "optimizer.optimizer_cpu_offload=False",
    "optimizer.optimizer_offload_fraction=0.0",
    "optimizer.optimizer_offload_placement=auto",
    "optimizer.use_torch_optimizer_for_cpu_offload=False",
    "model.cpu_offloading=False",
    "model.cpu_offloading_num_layers=0",
    "model.fine_grained_activation_offloading=False",
)
"""What makes the baseline of any run."""
LOSS_TOLERANCE = 1e-3  # what the reference reaches over 20 steps
WEIGHT_TOLERANCE = 1e-3  # norm of the difference over norm of the weights, where bits are not promised
# The allocator rounds every tensor up, to 512 bytes or 2 MiB, and the two runs hold different ones.
_ALLOCATOR_SLACK_BYTES = 16 * 2**20
_SLACK_SHARE = 0.01

Status = Literal["pass", "fail", "not measured"]


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was asked.

    Attributes:
        name: what.
        status: how it came out.
        figures: what was measured, in words.
    """

    name: str
    status: Status
    figures: str

    def line(self, number: int) -> str:
        """Return it as a numbered line."""
        return f"{number}. {self.status.upper()}  {self.name}: {self.figures}"


@dataclasses.dataclass
class Verification:
    """What :func:`verify` found.

    Attributes:
        checks: in the order of their numbers, from 1.
        baseline: the run with everything on the device.
        offloaded: the run with offloading.
        bitwise: whether equal bits were asked for.
    """

    checks: list[Check]
    baseline: Result
    offloaded: Result
    bitwise: bool

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.status != "fail" for check in self.checks)


def offloads(config: Config) -> bool:
    """Return whether a configuration offloads anything."""
    fraction = config.optimizer.optimizer_offload_fraction
    optimizer = config.optimizer.optimizer_cpu_offload and (fraction == "auto" or fraction > 0)
    return bool(optimizer or config.model.cpu_offloading or config.model.fine_grained_activation_offloading)


def promises_bits(config: Config) -> bool:
    """Return whether offloading by ``config`` promises the same bits as none, on this machine."""
    from forebay.host import kernels

    options = config.optimizer
    if not options.optimizer_cpu_offload:
        return True
    if options.optimizer != "adamw" or options.use_torch_optimizer_for_cpu_offload:
        return False  # torch's own classes are not those of the baseline
    return options.optimizer_offload_placement == "streamed" or kernels.backend() != "torch"


def verify(
    recipe: str,
    words: Sequence[str],
    config: Config,
    folder: Path,
    *,
    num_steps: int,
    num_timed_steps: int,
    deterministic: bool = True,
    max_slowdown: float | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Verification:
    """Run a recipe without offloading and as it is, each in a process of its own, and compare them.

    Both start from the same seed. Time and memory are measured in steps after those that are compared.

    Args:
        recipe: its name, or a file.
        words: overrides.
        config: what both give, validated.
        folder: for files of the runs; it exists.
        num_steps: to compare.
        num_timed_steps: to measure.
        deterministic: whether the compared steps use deterministic kernels only; else bits are not compared, but held
            to a tolerance. The timed steps use the kernels that training uses.
        max_slowdown: the step time over the baseline's that is too much. Default None: any is accepted.
        say: is told what is going on.
    """
    bitwise = deterministic and promises_bits(config)
    results = {}
    for name, own_words in (("baseline", [*words, *NO_OFFLOAD]), ("offloaded", [*words])):
        say(f"running {name}: {num_steps} compared and {num_timed_steps} timed steps ...")
        weights = None if bitwise else str(folder / f"{name}.weights.pt")
        point = Point(
            recipe,
            tuple(own_words),
            num_steps,
            num_timed_steps,
            digests=True,
            deterministic=deterministic,
            save_weights=weights,
        )
        # A proof is given anew each time, never taken from an earlier run.
        (folder / f"{name}.json").unlink(missing_ok=True)
        results[name] = run_point(point, folder, name)
        if results[name].status != "ok":
            break
    baseline, offloaded = results["baseline"], results.get("offloaded", Result("failed", "not run", {}))
    checks = [_accepted(results), _ended(results)]
    if all(check.status == "pass" for check in checks):
        a, b = baseline.data, offloaded.data
        checks += [_losses(a, b, bitwise), _weights(a, b, bitwise, folder), _state(a, b, bitwise)]
        checks += [*_memory_checks(a, b, config), _time(a, b, max_slowdown)]
    return Verification(checks, baseline, offloaded, bitwise)


def _accepted(results: dict[str, Result]) -> Check:
    refused = [f"{name}: {result.error}" for name, result in results.items() if result.status == "refused"]
    return Check(
        "configuration accepted", "fail" if refused else "pass", "; ".join(refused) or "with and without offloading"
    )


def _ended(results: dict[str, Result]) -> Check:
    bad = [f"{name}: {r.status.replace('_', ' ')}: {r.error}" for name, r in results.items() if r.status != "ok"]
    if any("deterministic implementation" in text for text in bad):
        bad.append("--nondeterministic compares within tolerances instead")
    return Check("both runs ended", "fail" if bad else "pass", "; ".join(bad) or "without running out of memory")


def _losses(a: dict[str, Any], b: dict[str, Any], bitwise: bool) -> Check:
    pairs = list(zip(a["losses"], b["losses"], strict=True))
    deltas = [abs(x - y) if math.isfinite(x) and math.isfinite(y) else math.inf for x, y in pairs]
    # Losses are fp32 numbers written out in full: equal numbers are equal bits.
    allowed = 0.0 if bitwise else LOSS_TOLERANCE
    bad = [step for step, delta in enumerate(deltas, 1) if delta > allowed or not delta < LOSS_TOLERANCE]
    name = "loss equal bit for bit" if bitwise else f"loss equal within {LOSS_TOLERANCE:g}"
    if bad:
        x, y = pairs[bad[0] - 1]
        figures = f"first differs at step {bad[0]} of {len(pairs)}: {x!r} without offloading, {y!r} with it"
        return Check(name, "fail", f"{figures}; largest difference {max(deltas):.3g}")
    return Check(name, "pass", f"{len(pairs)} steps, {pairs[0][0]:.4f} -> {pairs[-1][0]:.4f}, largest difference "
                 f"{max(deltas):.3g}")  # fmt: skip


def _weights(a: dict[str, Any], b: dict[str, Any], bitwise: bool, folder: Path) -> Check:
    steps = list(zip(b["weight_digests"], a["weight_digests"], strict=True))
    if not bitwise:
        return _close_weights(folder)
    for step, (actual, expected) in enumerate(steps, 1):
        parameter = first_difference(actual, expected)
        if parameter is not None:
            count = sum(actual.get(name) != digest for name, digest in expected.items())
            figures = (
                f"first differ after step {step} of {len(steps)}, in {parameter} ({count} of {len(expected)} differ)"
            )
            return Check("weights equal bit for bit", "fail", figures)
    return Check("weights equal bit for bit", "pass", f"{len(steps[0][0])} parameters after each of {len(steps)} steps")


def _close_weights(folder: Path) -> Check:
    import torch

    files = [folder / f"{name}.weights.pt" for name in ("baseline", "offloaded")]
    expected, actual = (torch.load(file, mmap=True) for file in files)
    worst, where = 0.0, next(iter(expected))
    for name, value in expected.items():
        change = (actual[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-30)
        if not float(change) <= worst:  # also for NaN
            worst, where = float(change), name
    for file in files:
        file.unlink()
    figures = f"largest relative difference {worst:.3g}, in {where}"
    name = f"final weights equal within {WEIGHT_TOLERANCE:g}"
    return Check(name, "pass" if worst <= WEIGHT_TOLERANCE else "fail", figures)


def _state(a: dict[str, Any], b: dict[str, Any], bitwise: bool) -> Check:
    name, expected = "optimizer state equal bit for bit", a["state_digests"]
    if not bitwise:
        return Check(name, "not measured", "not promised: see the check before")
    different = first_difference(b["state_digests"], expected)
    if different is not None:
        return Check(name, "fail", f"first differs in {different} after the last compared step")
    return Check(name, "pass", f"{len(expected)} values of {a['about']['optimizer']}")


def _memory_checks(a: dict[str, Any], b: dict[str, Any], config: Config) -> list[Check]:
    fraction = b["about"]["offload_fraction"]
    held, plan = b["held"], b["plan"]
    name_state, name_share = "optimizer state on the device as predicted", "its share that left the device"
    predicted, full = b["optimizer_device_bytes"], b["optimizer_device_bytes_without_offload"]
    checks = []
    if b["about"]["optimizer"] != a["about"]["optimizer"]:
        # Torch's classes allocate by themselves; the ledger knows only what forebay allocates.
        checks += [Check(name, "not measured", "torch's own classes hold it") for name in (name_state, name_share)]
    else:
        measured, without = (run["held"]["device"].get("optimizer_state", 0) for run in (b, a))
        ok = measured == predicted and without == full
        figures = f"{mib(predicted)} predicted, {mib(measured)} held; {mib(without)} without offloading"
        checks.append(Check(name_state, "pass" if ok else "fail", figures))
        share = 1 - measured / without if without else 0.0
        # A tensor is split at multiples of 1024 elements.
        close = abs(share - fraction) <= 0.005 + 2048 / b["about"]["num_optimizer_elements"]
        checks.append(Check(name_share, "pass" if close else "fail", f"{share:.2%} at fraction {fraction:g}"))
    checks.append(_drop(a, b, full - predicted))
    host = {tier: (sum(plan.get(tier, {}).values()), sum(held[tier].values())) for tier in ("pinned", "pageable")}
    if checks[0].status == "not measured" or config.model.cpu_offloading:
        checks.append(Check("host memory as predicted", "not measured", "part of it is not planned by forebay"))
    else:
        ok = all(needed == found for needed, found in host.values())
        figures = ", ".join(
            f"{tier} {mib(needed)} predicted, {mib(found)} held" for tier, (needed, found) in host.items()
        )
        checks.append(Check("host memory as predicted", "pass" if ok else "fail", figures))
    return checks


def saved_bytes(a: dict[str, Any], b: dict[str, Any]) -> int:
    """Return the device memory that ``b`` holds less than ``a`` between two steps, what is on its way left out."""
    held = []
    for run in (a, b):
        tier = run["held"]["device"]
        in_use = sum(tier.values()) if run["allocated_bytes"] is None else run["allocated_bytes"]
        # What visits, and a page of hyperparameters, is there only where something is offloaded.
        held.append(in_use - tier.get("staging", 0) - tier.get("other", 0))
    return held[0] - held[1]


def _drop(a: dict[str, Any], b: dict[str, Any], predicted: int) -> Check:
    name = "device memory drops with the fraction"
    if b["allocated_bytes"] is None and b["about"]["optimizer"] != a["about"]["optimizer"]:
        return Check(name, "not measured", "without a GPU only the ledger knows, and torch's own classes are not in it")
    saved = saved_bytes(a, b)
    slack = 0 if b["allocated_bytes"] is None else _ALLOCATOR_SLACK_BYTES + _SLACK_SHARE * predicted
    peak = a["device_peak_bytes"] - b["device_peak_bytes"]
    what = "by the ledger" if b["allocated_bytes"] is None else "allocated"
    return Check(
        name,
        "pass" if abs(saved - predicted) <= slack else "fail",
        f"{mib(saved)} less {what} between steps, {mib(predicted)} predicted; the peak drops by {mib(peak)}",
    )


def _time(a: dict[str, Any], b: dict[str, Any], max_slowdown: float | None) -> Check:
    before, after = a["median_step_ms"], b["median_step_ms"]
    slowdown = after / before
    figures = f"{before:.1f} ms -> {after:.1f} ms, {slowdown:.2f} times"
    if b["about"]["engine"] == "sim":
        figures += " (on a CPU, where nothing overlaps; says nothing about a GPU)"
    if max_slowdown is None:
        return Check("step time", "pass", figures)
    return Check("step time", "pass" if slowdown <= max_slowdown else "fail", f"{figures}; allowed {max_slowdown:g}")


def mib(num_bytes: float) -> str:
    """Return bytes as MiB, or GiB from a tenth of one."""
    from forebay.train.progress import size

    return f"-{size(-num_bytes)}" if num_bytes < 0 else size(num_bytes)


def first_difference(actual: dict[str, str], expected: dict[str, str]) -> str | None:
    """Return the first name, in the order of ``expected``, whose digests differ or that one side lacks."""
    for name in {**expected, **actual}:
        if actual.get(name) != expected.get(name):
            return name
    return None
