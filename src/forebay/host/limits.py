"""How much host memory there is, asked before anything is allocated.

A process that asks for more than there is does not get an error from Linux: it is killed, or its neighbour is.
"""

from __future__ import annotations

import dataclasses
import os
import resource
from pathlib import Path

GIB = 2**30
BUDGET_VARIABLE = "FOREBAY_HOST_MEMORY_GIB"
_NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


class HostMemoryError(MemoryError):
    """Host memory that is needed is not there; nothing was allocated."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """Host memory that may still be used.

    Attributes:
        available_bytes: how much.
        source: what says so, in words.
    """

    available_bytes: int
    source: str


def limits(*, pinned: bool, budget_bytes: int | None = None, root: Path = Path("/")) -> list[Limit]:
    """Return every limit that holds for this process, the tightest first.

    Args:
        pinned: whether the memory will be pinned, so that the limit on locked memory counts too.
        budget_bytes: the user's own limit on what forebay allocates. Default: ``FOREBAY_HOST_MEMORY_GIB``. It
            takes the place of what Linux says is available, which is too little on machines whose memory grows
            on demand.
        root: where ``/proc`` and ``/sys`` are.

    Raises:
        ValueError: if ``FOREBAY_HOST_MEMORY_GIB`` is not a positive number.
    """
    found = _cgroup_limits(root)
    budget = _budget_bytes() if budget_bytes is None else budget_bytes
    if budget is not None:
        source = f"the budget in {BUDGET_VARIABLE}" if budget_bytes is None else "the host memory budget"
        found.append(Limit(budget, source))
    else:
        found.append(Limit(_available_bytes(root), "MemAvailable in /proc/meminfo"))
    if pinned and not _may_lock_freely():
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if soft != resource.RLIM_INFINITY:
            found.append(Limit(soft, "the limit on locked memory (ulimit -l)"))
    return sorted(found, key=lambda limit: limit.available_bytes)


def available_host_memory(*, pinned: bool = False) -> int:
    """Return the bytes of host memory that may still be allocated."""
    return limits(pinned=pinned)[0].available_bytes


def check_host_memory(
    num_bytes: int,
    *,
    purpose: str,
    pinned: bool,
    hint: str = "lower optimizer.optimizer_offload_fraction (offload_fraction=...)",
    budget_bytes: int | None = None,
    root: Path = Path("/"),
) -> None:
    """Raise :class:`HostMemoryError` if ``num_bytes`` of host memory are not to be had.

    Args:
        num_bytes: how much is about to be allocated.
        purpose: what for, a word of the ledger.
        pinned: whether it will be pinned.
        hint: which setting needs less.
        budget_bytes: see :func:`limits`.
        root: see :func:`limits`.
    """
    tightest = limits(pinned=pinned, budget_bytes=budget_bytes, root=root)[0]
    if num_bytes > tightest.available_bytes:
        kind = "pinned host memory" if pinned else "host memory"
        raise HostMemoryError(
            f"{purpose.replace('_', ' ')} needs {num_bytes / GIB:.2f} GiB of {kind}, but "
            f"{tightest.available_bytes / GIB:.2f} GiB are available according to {tightest.source}; nothing was "
            f"allocated. To need less, {hint}; if there is more than Linux says, set {BUDGET_VARIABLE}"
        )


def _budget_bytes() -> int | None:
    text = os.environ.get(BUDGET_VARIABLE)
    if text is None:
        return None
    try:
        gib = float(text)
    except ValueError:
        gib = -1.0
    if not gib > 0:
        raise ValueError(f"{BUDGET_VARIABLE} must be a number of GiB above 0, such as 64 or 1.5, got {text!r}")
    return int(gib * GIB)


def _available_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _NO_LIMIT


def _cgroup_limits(root: Path) -> list[Limit]:
    """Return the limit of each control group that this process is in, from its own up to the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = Path(path.lstrip("/"))
        for part in (folder, *folder.parents):
            limit = _cgroup_limit(mount / part, *names)
            if limit is not None:
                found.append(limit)
    return found


def _cgroup_limit(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> Limit | None:
    try:
        text = (folder / limit_name).read_text().strip()
        usage_bytes = int((folder / usage_name).read_text())
    except (OSError, ValueError):
        return None
    if text == "max" or int(text) >= _NO_LIMIT:
        return None
    cache_bytes = 0
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith(cache_name + " "):
                cache_bytes = int(line.split()[1])  # given back before anything is killed
    except OSError:
        pass
    return Limit(max(0, int(text) - usage_bytes + cache_bytes), f"the control group limit {folder / limit_name}")


def _may_lock_freely() -> bool:
    # Root, or CAP_IPC_LOCK (bit 14), is not held to the limit on locked memory.
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> 14 & 1)
    except OSError:
        pass
    return os.geteuid() == 0
