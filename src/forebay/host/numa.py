"""Which cores and which memory are near a device, and how many threads a rank may use.

A copy between a GPU and the memory of the other socket crosses the link between the sockets and loses part of
its bandwidth, so pinned memory and host updates belong on the GPU's own NUMA node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PCI_BUS_ID = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")


def affinity() -> set[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))  # macOS has no affinity


def pci_bus_id(properties: Any) -> str:
    """Return where on the bus a GPU is, from ``torch.cuda.get_device_properties``: ``"0000:3b:00.0"``."""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def numa_node_of_pci_device(pci_bus_id: str, *, root: Path = Path("/")) -> int | None:
    """Return the NUMA node that a PCI device is attached to.

    Args:
        pci_bus_id: as CUDA or Linux write it: ``"00000000:3B:00.0"``, ``"0000:3b:00.0"`` or ``"3b:00.0"``.
        root: where ``/sys`` is.

    Returns:
        The node; None where Linux does not know it (one node, a virtual machine, no such device).

    Raises:
        ValueError: if ``pci_bus_id`` is not one.
    """
    match = _PCI_BUS_ID.fullmatch(pci_bus_id.strip())
    if match is None:
        raise ValueError(
            f"{pci_bus_id!r} is not a PCI bus id; it is written domain:bus:device.function in hexadecimal, such as "
            "'0000:3b:00.0' (nvidia-smi --query-gpu=pci.bus_id --format=csv)"
        )
    domain, bus, device, function = match.groups()
    # CUDA writes eight digits of the domain, in capitals; sysfs four, or more where the domain needs them.
    name = f"{int(domain or '0', 16):04x}:{bus.lower()}:{device.lower()}.{function}"
    try:
        node = int((root / "sys/bus/pci/devices" / name / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cores_of_node(node: int, *, root: Path = Path("/"), within: set[int] | None = None) -> set[int]:
    """Return the cores of a NUMA node that this process may run on; empty where the node is not known.

    Args:
        node: the node.
        root: where ``/sys`` is.
        within: cores to choose from. Default: the process's affinity.
    """
    try:
        text = (root / f"sys/devices/system/node/node{node}/cpulist").read_text()
    except OSError:
        return set()
    return _parse_cpu_list(text) & (affinity() if within is None else within)


def num_local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks share this machine: ``LOCAL_WORLD_SIZE`` as torchrun sets it, else 1.

    Raises:
        ValueError: if it is not a whole number above 0.
    """
    return _positive(environment, "LOCAL_WORLD_SIZE") or 1


def threads_per_rank(environment: Mapping[str, str] = os.environ, *, num_cores: int | None = None) -> int:
    """Return how many threads a rank may use for host work, at least 1.

    ``FOREBAY_NUM_THREADS`` if set, else the cores divided by the ranks that share them: the rule of the host
    kernels (``native/src/pool.cpp``).

    Args:
        environment: where the variables are.
        num_cores: cores to share. Default: those of the process's affinity.

    Raises:
        ValueError: if one of the variables is not a whole number above 0.
    """
    threads = _positive(environment, "FOREBAY_NUM_THREADS")
    if threads is not None:
        return threads
    cores = len(affinity()) if num_cores is None else num_cores
    return max(1, cores // num_local_ranks(environment))


def _positive(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name} must be a whole number above 0, such as 8, or unset, got {text!r}")
    return int(text)


def _parse_cpu_list(text: str) -> set[int]:
    """Parse ``"0-3,8"``; a node without cores has an empty list."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores
