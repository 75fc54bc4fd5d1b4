"""Measuring a machine in under a minute: everything that a plan goes by, through the engine that training uses."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from forebay.engine import Engine, Event, Lane
from forebay.engine.measure import Copies, HostUpdate, best_seconds
from forebay.host import affinity, cores_of_node, kernels
from forebay.host.limits import available_host_memory, limits
from forebay.plan.profile import Number, Profile, load, shipped

MIB = 2**20
Progress = Callable[[str], None]

COPY_MIB = (1, 4, 16, 64, 256)
_PLANNED_MIB = 64  # forebay's chunks are 64 to 160 MiB
_BATCH_BYTES = 512 * MIB
_NUM_ROUNDS = 3
# Enough to outgrow every cache, and not a power of two long: see DEFAULT_CHUNK_ELEMENTS of the optimizer.
_NUM_ELEMENTS = 24 * MIB - 9 * 1024


def calibrate(engine: Engine, *, scale: float = 1.0, progress: Progress = lambda what: None) -> Profile:
    """Measure this machine and return its profile.

    Needs about 1.5 GiB of host memory, 1 GiB of it pinned, and 1 GiB of the GPU's. Blocks Python.

    Args:
        engine: of the device. The simulator measures copies within host memory.
        scale: of all sizes; below 1 it is faster and less exact. Default 1.0.
        progress: called with what is measured next.

    Raises:
        HostMemoryError: when that much host memory is not there.
    """
    source = f"{_gpu_name(engine)}, torch {torch.__version__}, {datetime.date.today().isoformat()}"
    numbers: dict[str, Number] = {}
    details: dict[str, Any] = {"engine": engine.kind, "host_kernel": kernels.backend()}

    def put(name: str, value: float, how: str) -> None:
        numbers[name] = Number(float(f"{value:.4g}"), "measured", f"{source}: {how}")

    put("gpu_memory_gib", _device_bytes(engine) / 2**30, "as torch reports it")
    put("host_cores", len(affinity()), "the affinity of the process")
    progress("pinned allocation")
    put("pinned_allocation_gbps", _pinned_allocation_gbps(engine, scale), "one slab")
    progress("copies")
    curves = _copy_curves(engine, scale)
    details["copy_gbps_by_mib"] = curves
    for name, curve in curves.items():
        nearest = min(curve, key=lambda mib: abs(mib - _PLANNED_MIB))
        put(f"{name}_gbps", curve[nearest], f"{nearest} MiB copies")
    progress("host memory")
    bandwidth_bytes = int(256 * MIB * scale)
    put(
        "host_memory_gbps",
        kernels.stream_bandwidth(bandwidth_bytes, "update", _NUM_ROUNDS) / 1e9,
        "in place, all threads",
    )
    details["host_memory_copy_gbps"] = round(kernels.stream_bandwidth(bandwidth_bytes, "copy", _NUM_ROUNDS) / 1e9, 1)
    progress("host updates")
    num_elements = max(64 * 1024, int(_NUM_ELEMENTS * scale))
    with_copies_gbps, by_threads = _host_updates(engine, num_elements, max(MIB, int(_PLANNED_MIB * MIB * scale)))
    put(
        "host_update_gbps", with_copies_gbps, f"AdamW of bf16 weights while copies run, {kernels.num_threads()} threads"
    )
    details["host_update_gparam_per_s_by_threads"] = by_threads
    progress("matrix products and GPU memory")
    put("matmul_tflops", _matmul_tflops(engine, scale), "square bf16 matrices")
    put("gpu_memory_gbps", _device_memory_gbps(engine, scale), "copy within the device, read and written")
    details["pinned_limits"] = [
        {"available_gib": round(limit.available_bytes / 2**30, 2), "source": limit.source}
        for limit in limits(pinned=True)
    ]
    details["numa"] = _numa()
    names = (_gpu_name(engine),) if engine.device.type == "cuda" else ()
    for name in shipped():
        # One GPU cannot measure what joins several: that stays the datasheet's, and says so.
        other = load(name)
        if set(names) & set(other.gpu_names):
            numbers |= {link: other.numbers[link] for link in ("gpu_link_gbps", "network_gbps")}
    return Profile("this machine", f"{source}, {len(affinity())} cores", numbers, names, details)


def _gpu_name(engine: Engine) -> str:
    return torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "no GPU"


def _device_bytes(engine: Engine) -> int:
    if engine.device.type == "cuda":
        return int(torch.cuda.get_device_properties(engine.device).total_memory)
    return available_host_memory()


def _pinned_allocation_gbps(engine: Engine, scale: float) -> float:
    num_bytes = int(1024 * MIB * scale)
    start = time.perf_counter()
    buffer = engine.empty_host(num_bytes, "other")
    seconds = time.perf_counter() - start
    buffer.release()
    return num_bytes / seconds / 1e9


def _copy_curves(engine: Engine, scale: float) -> dict[str, dict[int, float]]:
    """Return GB/s by size in MiB: each way alone, and each way while both run."""
    curves: dict[str, dict[int, float]] = {name: {} for name in ("down", "up", "down_both", "up_both")}
    for mib in COPY_MIB:
        num_bytes = max(4096, int(mib * MIB * scale))
        copies = Copies(engine, num_bytes, max(2, int(_BATCH_BYTES * scale) // num_bytes))
        curves["down"][mib] = _rounded(copies.gbps([Lane.DOWN], _NUM_ROUNDS))
        curves["up"][mib] = _rounded(copies.gbps([Lane.UP], _NUM_ROUNDS))
        curves["down_both"][mib] = curves["up_both"][mib] = _rounded(copies.gbps([Lane.DOWN, Lane.UP], _NUM_ROUNDS))
        copies.release()
    return curves


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _host_updates(engine: Engine, num_elements: int, copy_bytes: int) -> tuple[float, dict[int, float]]:
    """Return GB/s of the host kernel beside copies, and Gparam/s by threads without them."""
    update = HostUpdate(engine, num_elements)
    by_threads = {}
    most = kernels.num_threads()
    for threads in sorted({1, 2, 4, 8, 16, 32, 64, most}):
        if threads <= most:
            kernels.set_num_threads(threads)
            by_threads[threads] = round(update.gparam_per_s(_NUM_ROUNDS), 3)
    kernels.set_num_threads(None)
    # Twice the time of the update on either lane, so that copies run until it is over.
    count = max(4, int(2 * num_elements / by_threads[most] / 1e9 * 50e9 / copy_bytes))
    copies = Copies(engine, copy_bytes, count)
    with_copies_gbps = update.gbps_beside(copies, count, _NUM_ROUNDS)
    copies.release()
    update.release()
    return with_copies_gbps, by_threads


def _matmul_tflops(engine: Engine, scale: float) -> float:
    size = int(8192 * scale) if engine.device.type == "cuda" else int(512 * min(1.0, 2 * scale))
    # Random: constant matrices take less power, and so run at a higher clock than training does.
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=engine.device) for _ in range(2))
    count = 10

    def work() -> list[Event]:
        for _ in range(count):
            torch.mm(left, right)
        return [engine.record(Lane.COMPUTE)]

    return 2 * size**3 * count / best_seconds(work, _NUM_ROUNDS) / 1e12


def _device_memory_gbps(engine: Engine, scale: float) -> float:
    source = torch.zeros(int(256 * MIB * scale), dtype=torch.uint8, device=engine.device)
    destination = torch.empty_like(source)

    def work() -> list[Event]:
        for _ in range(4):
            destination.copy_(source)
        return [engine.record(Lane.COMPUTE)]

    return 8 * source.numel() / best_seconds(work, _NUM_ROUNDS) / 1e9


def _numa() -> dict[str, int]:
    """Return how many of this process's cores each NUMA node has."""
    nodes = sorted(int(folder.name[4:]) for folder in Path("/sys/devices/system/node").glob("node[0-9]*"))
    return {f"node {node}": len(cores_of_node(node)) for node in nodes}
