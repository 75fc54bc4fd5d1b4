"""Who behaves like torch.optim.AdamW: every behaviour of tests/parity in forebay and its peers, as a Markdown table.

    python benchmarks/parity.py --systems forebay,hybrid,megatron,torchao --device cuda

A cell is "passes"; "differs", where a script ran to its end with another result than plain torch; or "fails", where
the optimizer raised. Each is run at every fraction that the system has, and the first that does not pass is named.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import platform
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "parity"), str(ROOT / "tests" / "support")]

from parity_behaviours import BEHAVIOURS, Behaviour, Differs, Maker  # noqa: E402

FRACTIONS = (0.0, 0.5, 1.0)
Build = Callable[..., torch.optim.Optimizer]
LONGEST = 170  # characters of a reason in a cell


def forebay() -> dict[str, tuple[Build, float]]:
    from forebay import AdamW

    def build(placement: str) -> Build:
        def make(params: Any, fraction: float, **kwargs: Any) -> torch.optim.Optimizer:
            # Small chunks, so that the small model has several.
            return AdamW(params, offload_fraction=fraction, placement=placement, chunk_elements=4096, **kwargs)

        return make

    cases: dict[str, tuple[Build, float]] = {"fraction 0": (build("auto"), 0.0)}
    for fraction in FRACTIONS[1:]:
        for placement in ("streamed", "host"):
            cases[f"fraction {fraction:g}, {placement}"] = (build(placement), fraction)
    return cases


def hybrid() -> dict[str, tuple[Build, float]]:
    from forebay import HybridDeviceOptimizer

    def build(params: Any, fraction: float, **kwargs: Any) -> torch.optim.Optimizer:
        return HybridDeviceOptimizer(params, fraction, param_update_in_fp32=True, **kwargs)

    return {f"fraction {fraction:g}": (build, fraction) for fraction in FRACTIONS}


def megatron() -> dict[str, tuple[Build, float]]:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    def build(params: Any, fraction: float, **kwargs: Any) -> torch.optim.Optimizer:
        return HybridDeviceOptimizer(
            params,
            offload_fraction=fraction,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            param_update_in_fp32=True,
            overlap_cpu_optimizer_d2h_h2d=True,
            **kwargs,
        )

    return {f"fraction {fraction:g}": (build, fraction) for fraction in FRACTIONS}


def torchao() -> dict[str, tuple[Build, float]]:
    from torchao.optim import CPUOffloadOptimizer

    def build(params: Any, fraction: float, **kwargs: Any) -> torch.optim.Optimizer:
        return CPUOffloadOptimizer(params, torch.optim.AdamW, minimal_size=0, **kwargs)

    return {"all offloaded": (build, 1.0)}  # it has no fraction


# name: (cases, column title, package, needs CUDA)
SYSTEMS: dict[str, tuple[Callable[[], dict[str, tuple[Build, float]]], str, str, bool]] = {
    "forebay": (forebay, "forebay.AdamW", "forebay", False),
    "hybrid": (hybrid, "forebay.HybridDeviceOptimizer", "forebay", False),
    "megatron": (megatron, "Megatron Core HybridDeviceOptimizer", "megatron-core", True),
    "torchao": (torchao, "torchao CPUOffloadOptimizer", "torchao", True),
}


def outcome(behaviour: Behaviour, cases: dict[str, tuple[Build, float]], device: str) -> str:
    """Return the cell of one behaviour and system."""
    reasons = {}
    for case, (build, fraction) in cases.items():
        try:
            behaviour.check(Maker(build, fraction, device))
        except Differs as error:
            reasons[case] = f"differs: {error}"
        except Exception as error:
            reasons[case] = f"fails: {describe(error)}"
    if not reasons:
        return "passes"
    reason = " ".join(next(iter(reasons.values())).split()).replace("|", "\\|")
    reason = reason if len(reason) <= LONGEST else reason[: LONGEST - 3] + "..."
    if len(cases) == 1:
        return reason
    return f"{reason} ({'at every fraction' if len(reasons) == len(cases) else '; '.join(reasons)})"


def describe(error: Exception) -> str:
    """Return the exception and, if it has no message of its own, the line that raised it."""
    text = str(error) or f"at `{traceback.extract_tb(error.__traceback__)[-1].line}`"
    return f"{type(error).__name__}: {text}"


def version(package: str) -> str:
    """Return a package's version; forebay may be run from its sources, without being installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        module = importlib.import_module(package.replace("-", "_"))
        return str(getattr(module, "__version__", "(version unknown)"))


def column(name: str, device: str) -> tuple[str, list[str]]:
    """Return the title and the cells of a system."""
    cases_of, title, package, needs_cuda = SYSTEMS[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cases = cases_of()
        title = f"{title} {version(package)}"
    except ImportError as error:
        return title, [f"not installed: {error}"] * len(BEHAVIOURS)
    if needs_cuda and device == "cpu":
        return title, ["needs CUDA"] * len(BEHAVIOURS)
    return title, [outcome(behaviour, cases, device) for behaviour in BEHAVIOURS.values()]


def report(columns: list[tuple[str, list[str]]], device: str) -> str:
    """Return the Markdown page."""
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"
    lines = [
        f"# Parity with torch.optim.AdamW on {device.upper()}",
        "",
        f"torch {torch.__version__}, {where}, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}. Made by "
        f"`python benchmarks/parity.py --device {device}`; the scripts are in `tests/parity/parity_behaviours/`.",
        "",
        "Each behaviour is a script that runs twice on the same data, with the optimizer and with plain torch; for "
        "bf16 behaviours, plain torch on fp32 copies. *passes*: the same within rounding at fractions 0, 0.5 and 1. "
        "*differs*: it ran, with another result. *fails*: it raised. torchao has no fraction; all is offloaded there.",
        "",
    ]
    passed = [
        f"{cells.count('passes')} of {len(cells)}" if len(set(cells)) > 1 or "passes" in cells else "not run"
        for _, cells in columns
    ]
    rows = [["behaviour", *(title for title, _ in columns)], ["---"] * (len(columns) + 1)]
    for index, behaviour in enumerate(BEHAVIOURS.values()):
        rows.append([f"{behaviour.expectation} (`{behaviour.name}`)", *(cells[index] for _, cells in columns)])
    rows.append(["**passes**", *passed])
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"some of {','.join(SYSTEMS)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="default: benchmarks/reports/parity_<device>.md")
    arguments = parser.parse_args()
    names = arguments.systems.split(",")
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        parser.error(f"unknown systems {', '.join(unknown)}; choose from {', '.join(SYSTEMS)}")
    text = report([column(name, arguments.device) for name in names], arguments.device)
    output = arguments.output or ROOT / "benchmarks" / "reports" / f"parity_{arguments.device}.md"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
