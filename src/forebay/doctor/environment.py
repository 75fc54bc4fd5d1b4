"""What of a machine bears on offloading: drivers, kernels, limits, memory layout and settings."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

import forebay
from forebay.host import kernels
from forebay.host.limits import in_gib, limits
from forebay.host.numa import affinity, numa_node_of_pci_device, pci_bus_id, threads_per_rank

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_VECTOR_FLAGS = ("avx512f", "avx512bw", "avx2", "fma", "asimd", "sve")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: what was looked at.
        value: what it is.
        advice: what to do about it; None where nothing is wrong.
        is_problem: whether offloading fails or is several times slower because of it.
    """

    topic: str
    value: str
    advice: str | None = None
    is_problem: bool = False


def inspect_environment(*, root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Return what was found, the same topics in the same order on every machine.

    Looks at the GPUs through torch, which initialises CUDA; allocates nothing.

    Args:
        root: where ``/proc`` and ``/sys`` are.
        environment: the variables.
    """
    return [
        Finding("forebay", f"{forebay.__version__}, Python {platform.python_version()}, {platform.platform()}"),
        *_torch_and_gpus(root),
        _host_kernel(environment),
        _cpu(root),
        *_cores(root, environment),
        *_memory_limits(root, environment),
        _numa(root),
        _huge_pages(root),
        _allocator(environment),
        *_variables(environment),
    ]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _torch_and_gpus(root: Path) -> Iterator[Finding]:
    driver = _read(root / "proc/driver/nvidia/version")
    version = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", driver.splitlines()[0]) if driver else None
    yield Finding("driver", f"NVIDIA {version.group(1)}" if version else "no NVIDIA driver")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    text = f"{torch.__version__} ({build})"
    if driver and not torch.version.cuda:
        advice = "this torch is built without CUDA, so the GPU is not used; install the build for your CUDA version"
        yield Finding("torch", text, advice, is_problem=True)
    elif driver and not torch.cuda.is_available():
        advice = (
            "torch sees no GPU: CUDA_VISIBLE_DEVICES, a driver older than torch's CUDA, or a container without GPUs"
        )
        yield Finding("torch", text, advice, is_problem=True)
    else:
        yield Finding("torch", text)
    if not torch.cuda.is_available():
        yield Finding("gpu", "none: training and offloading run on the CPU, through the simulator")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield _gpu(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB", pci_bus_id(properties), root)


def _gpu(what: str, bus: str, root: Path) -> Finding:
    folder = root / "sys/bus/pci/devices" / bus
    width, most = _read(folder / "current_link_width"), _read(folder / "max_link_width")
    speed = _read(folder / "max_link_speed")
    node = numa_node_of_pci_device(bus, root=root)
    value = f"{what}, PCI {bus}, link x{width or '?'} up to {speed or '?'}, NUMA node {'?' if node is None else node}"
    if width and most and width.isdecimal() and most.isdecimal() and int(width) < int(most):
        advice = f"the link has {width} of {most} lanes, so copies run at {int(width) / int(most):.0%} of the speed"
        return Finding("gpu", value, f"{advice}; look at the slot and at riser cables", is_problem=True)
    return Finding("gpu", value)


def _host_kernel(environment: Mapping[str, str]) -> Finding:
    try:
        name, threads = kernels.backend(), kernels.num_threads()
    except (ValueError, RuntimeError) as error:  # a wrong FOREBAY_NATIVE..., or a library of another version
        return Finding("host kernel", "cannot be loaded", str(error), is_problem=True)
    value = f"{name}, {threads} threads"
    if name != "torch":
        asked = environment.get("FOREBAY_NATIVE_ISA")
        return Finding(
            "host kernel", value + (f" (FOREBAY_NATIVE_ISA={asked})" if asked else " (the best of this CPU)")
        )
    if environment.get("FOREBAY_NATIVE") == "0":
        return Finding(
            "host kernel", value + " (FOREBAY_NATIVE=0)", "unset FOREBAY_NATIVE: torch is several times slower"
        )
    advice = "the native library was not built: install a C++17 compiler and run pip install --force-reinstall forebay"
    return Finding("host kernel", value + " (no native library)", advice, is_problem=True)


def _cpu(root: Path) -> Finding:
    text = _read(root / "proc/cpuinfo") or ""
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    vectors = [flag for flag in _VECTOR_FLAGS if flags and flag in flags.group(1).split()]
    name = model.group(1) if model else platform.machine()
    return Finding("instruction set", f"{name}: {', '.join(vectors) or 'no vector instructions known'}")


def _cores(root: Path, environment: Mapping[str, str]) -> Iterator[Finding]:
    cores = len(affinity())
    value = f"{cores} in this process's affinity, {os.cpu_count()} in the machine"
    try:
        threads = threads_per_rank(environment)
    except ValueError as error:
        yield Finding("cores", value, str(error), is_problem=True)
        return
    value += f"; {threads} threads for the updates of this rank"
    quota = _cpu_quota(root)
    if quota is not None and quota < threads:
        advice = (
            f"the control group allows {quota:g} cores' time, so {threads} threads are stopped in turns; "
            f"set FOREBAY_NUM_THREADS={max(1, int(quota))}"
        )
        yield Finding("cores", value, advice, is_problem=True)
    else:
        yield Finding("cores", value)


def _cpu_quota(root: Path) -> float | None:
    """Return the cores' time that the innermost control group allows; None without a limit."""
    second = (_read(root / "sys/fs/cgroup/cpu.max") or "").split()
    if len(second) == 2 and second[0] != "max":
        return int(second[0]) / int(second[1])
    quota = _read(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period = _read(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if quota and period and int(quota) > 0:
        return int(quota) / int(period)
    return None


def _memory_limits(root: Path, environment: Mapping[str, str]) -> Iterator[Finding]:
    lines = (_read(root / "proc/self/limits") or "").splitlines()
    memlock = next((line.split()[3:5] for line in lines if line.startswith("Max locked memory")), None)
    try:
        found = limits(pinned=True, root=root, environment=environment)
    except (ValueError, RuntimeError) as error:
        yield Finding("host memory", "unknown", str(error), is_problem=True)
        return
    locked = next((limit for limit in found if "RLIMIT_MEMLOCK" in limit.source), None)
    value = "unlimited" if memlock is None else f"soft {memlock[0]}, hard {memlock[1]}"
    if locked is None:
        yield Finding("memlock", f"{value}; does not hold pinned memory back")
    else:
        yield Finding(
            "memlock", f"{value}; {in_gib(locked.available_bytes)} may be pinned", locked.remedy, is_problem=True
        )
    for limit in found:
        if limit is not locked:
            yield Finding("host memory", f"{in_gib(limit.available_bytes)} according to {limit.source}")


def _numa(root: Path) -> Finding:
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    nodes = [f"node {folder.name[4:]}: cores {_read(folder / 'cpulist') or 'none'}" for folder in folders]
    return Finding("numa", "; ".join(nodes) or "not known")


def _huge_pages(root: Path) -> Finding:
    text = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if text is None:
        return Finding("huge pages", "not known")
    chosen = re.search(r"\[(\w+)\]", text)
    value = f"transparent: {chosen.group(1) if chosen else text}"
    if chosen and chosen.group(1) == "never":
        advice = "pinning takes several times longer in 4 KiB pages: write madvise to transparent_hugepage/enabled"
        return Finding("huge pages", value, advice)
    return Finding("huge pages", value)


def _allocator(environment: Mapping[str, str]) -> Finding:
    given = {name: environment[name] for name in _ALLOCATOR_VARIABLES if environment.get(name)}
    value = ", ".join(f"{name}={text}" for name, text in given.items()) or "defaults"
    if environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        advice = "unset PYTORCH_NO_CUDA_MEMORY_CACHING: every allocation then waits for the GPU, which ends all overlap"
        return Finding("allocator", value, advice, is_problem=True)
    text = " ".join(given.values()).lower()
    if "cudamallocasync" in text:
        return Finding("allocator", value, "with backend:cudaMallocAsync, torch's peak figures are less exact")
    if "expandable_segments:true" not in text:
        advice = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, if memory is held that torch cannot use"
        return Finding("allocator", value, advice)
    return Finding("allocator", value)


def _variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    if environment.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield Finding(
            "variables",
            "CUDA_LAUNCH_BLOCKING=1",
            "unset it: nothing overlaps while every launch waits",
            is_problem=True,
        )
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        advice = (
            "copies queue behind kernels on one connection; Megatron's tensor parallelism needs it before Blackwell, "
            "else unset it"
        )
        yield Finding("variables", "CUDA_DEVICE_MAX_CONNECTIONS=1", advice)
    if environment.get("OMP_NUM_THREADS") == "1":
        advice = (
            "torch's and DeepSpeed's CPU Adam run on one core (torchrun sets it); forebay's kernel does not read it"
        )
        yield Finding("variables", "OMP_NUM_THREADS=1", advice)
