"""How much host memory there is, asked before anything is allocated.

A process that asks for more than there is does not get an error from Linux: it is killed, or its neighbour is.

What is asked is what may be allocated now. Ranks that start together all see the same free memory, so whoever
plans for several ranks of a machine asks once, for the sum of what they need.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

GIB = 2**30
BUDGET_VARIABLE = "FOREBAY_HOST_MEMORY_GIB"
DEFAULT_SETTING_HINT = "lower optimizer.optimizer_offload_fraction"
_NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"
_CAP_IPC_LOCK = 14
_INITIAL_UID_MAP = ["0", "0", "4294967295"]


class HostMemoryError(MemoryError):
    """Host memory that is needed is not there; nothing stays allocated."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """Host memory that may still be used.

    Attributes:
        available_bytes: how much.
        source: what says so, in words: the file or the setting.
        remedy: what to do when it is too little, other than needing less.
    """

    available_bytes: int
    source: str
    remedy: str


def limits(
    *,
    pinned: bool,
    budget_bytes: int | None = None,
    used_bytes: int = 0,
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
) -> list[Limit]:
    """Return every limit that holds for this process, the tightest first.

    Control groups (v2 and v1, from the process's own up to the root) always hold. The other limits are
    estimates, and a budget that the user gives takes their place, be it lower or higher:

    - MemAvailable, which is too little on virtual machines whose memory grows on demand;
    - RLIMIT_MEMLOCK, for pinned memory of a process without CAP_IPC_LOCK. ``cudaHostRegister`` pins through the
      driver, which need not keep to it.

    Args:
        pinned: whether the memory will be pinned.
        budget_bytes: the most host memory that forebay may hold in this process. Default None:
            ``FOREBAY_HOST_MEMORY_GIB`` if set.
        used_bytes: how much of the budget is in use already. Default 0. The other limits know it themselves.
        root: where ``/proc`` and ``/sys`` are.
        environment: where ``FOREBAY_HOST_MEMORY_GIB`` is looked up.

    Raises:
        ValueError: if ``FOREBAY_HOST_MEMORY_GIB`` is not a number above 0.
    """
    found = _cgroup_limits(root)
    budget = _budget(budget_bytes, used_bytes, environment)
    if budget is not None:
        found.append(budget)
    else:
        found.append(_free_memory(root))
        lockable = _locked_memory(root) if pinned else None
        if lockable is not None:
            found.append(lockable)
    return sorted(found, key=lambda limit: limit.available_bytes)


def available_host_memory(*, pinned: bool = False, used_bytes: int = 0, root: Path = Path("/")) -> int:
    """Return the bytes of host memory that may still be allocated; see :func:`limits`."""
    return limits(pinned=pinned, used_bytes=used_bytes, root=root)[0].available_bytes


def check_host_memory(
    num_bytes: int,
    *,
    purpose: str,
    pinned: bool,
    budget_bytes: int | None = None,
    used_bytes: int = 0,
    setting_hint: str = DEFAULT_SETTING_HINT,
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Raise :class:`HostMemoryError` if ``num_bytes`` of host memory are not to be had.

    Args:
        num_bytes: how much is about to be allocated.
        purpose: what for, a word of the ledger.
        pinned: whether it will be pinned.
        budget_bytes: see :func:`limits`.
        used_bytes: see :func:`limits`.
        setting_hint: which setting needs less, as an order.
        root: see :func:`limits`.
        environment: see :func:`limits`.
    """
    tightest = limits(
        pinned=pinned, budget_bytes=budget_bytes, used_bytes=used_bytes, root=root, environment=environment
    )[0]
    if num_bytes > tightest.available_bytes:
        kind = "pinned host memory" if pinned else "host memory"
        raise HostMemoryError(
            f"{in_words(purpose)} needs {in_gib(num_bytes)} of {kind}, but only {in_gib(tightest.available_bytes)} "
            f"are available according to {tightest.source}; nothing was allocated. To need less, {setting_hint}; "
            f"to have more, {tightest.remedy}"
        )


def in_words(purpose: str) -> str:
    """Return a purpose of the ledger as it reads in a sentence."""
    return purpose.replace("_", " ")


def in_gib(num_bytes: int) -> str:
    """Return bytes as text in GiB, with as many digits as small amounts need."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes == 0 or num_bytes >= GIB / 10 else f"{num_bytes / GIB:.3g} GiB"


def _budget(budget_bytes: int | None, used_bytes: int, environment: Mapping[str, str]) -> Limit | None:
    source, remedy = "the host memory budget", "raise the budget"
    if budget_bytes is None:
        text = environment.get(BUDGET_VARIABLE, "").strip()
        if not text:
            return None
        try:
            gib = float(text)
        except ValueError:
            gib = -1.0
        if not 0 < gib < _NO_LIMIT / GIB:  # also turns nan and inf away
            raise ValueError(f"{BUDGET_VARIABLE} must be a number of GiB above 0, such as 64 or 1.5, got {text!r}")
        budget_bytes, source, remedy = int(gib * GIB), f"{BUDGET_VARIABLE}={text}", f"raise {BUDGET_VARIABLE}"
    if used_bytes:
        source += f", of which {in_gib(used_bytes)} are in use"
    return Limit(max(0, budget_bytes - used_bytes), source, remedy)


def _free_memory(root: Path) -> Limit:
    remedy = (
        f"free memory on this machine, or set {BUDGET_VARIABLE} if it can really have more (a virtual machine whose "
        "memory grows on demand)"
    )
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        import psutil

        return Limit(psutil.virtual_memory().available, "the free memory that psutil reports", remedy)
    for line in lines:
        if line.startswith("MemAvailable:"):
            return Limit(int(line.split()[1]) * 1024, f"MemAvailable in {root / 'proc/meminfo'}", remedy)
    raise RuntimeError(f"{root / 'proc/meminfo'} has no MemAvailable (Linux before 3.14?); set {BUDGET_VARIABLE}")


def _locked_memory(root: Path) -> Limit | None:
    """Return what RLIMIT_MEMLOCK leaves; None if it is unlimited or does not hold for this process."""
    if _may_lock_freely(root):
        return None
    try:
        lines = (root / "proc/self/limits").read_text().splitlines()
    except OSError:
        return None
    soft = next((line.split()[3] for line in lines if line.startswith("Max locked memory")), "unlimited")
    if soft == "unlimited":
        return None
    # Two counters, both held to the limit: mlock's, and that of drivers that pin pages.
    locked_bytes = sum(int(_status(root, name, "0").split()[0]) for name in ("VmLck", "VmPin")) * 1024
    return Limit(
        max(0, int(soft) - locked_bytes),
        f"RLIMIT_MEMLOCK (ulimit -l, {root / 'proc/self/limits'})",
        "raise it (ulimit -l unlimited, or memlock in /etc/security/limits.conf). It is taken to hold because the "
        "process lacks CAP_IPC_LOCK, but cudaHostRegister pins through the driver, which need not keep to it: set "
        f"{BUDGET_VARIABLE} to have the driver asked for as much as that",
    )


def _may_lock_freely(root: Path) -> bool:
    # CAP_IPC_LOCK, which root has, lifts the limit on locked memory; but not inside a user namespace (rootless
    # containers), where a process has the capability only over what the namespace owns.
    if not int(_status(root, "CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1:
        return False
    try:
        return (root / "proc/self/uid_map").read_text().split() == _INITIAL_UID_MAP
    except OSError:
        return True  # a kernel without user namespaces


def _status(root: Path, name: str, default: str) -> str:
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
    except OSError:
        return default
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name + ":")), default)


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
            mount, usage_name, prefix = root / "sys/fs/cgroup", "memory.current", ""
            limit_names = ["memory.max", "memory.high"]  # above `high` a process is not killed but hardly moves
        elif "memory" in controllers.split(","):
            mount, usage_name, prefix = root / "sys/fs/cgroup/memory", "memory.usage_in_bytes", "total_"
            limit_names = ["memory.limit_in_bytes"]
        else:
            continue
        # In a container the path may be the host's (nothing is there) or lead out of the mount ("/../x"): the
        # walk up still ends at the mount, which is the container's own group then.
        folder = PurePosixPath(*(part for part in path.split("/") if part not in ("", "..")))
        for part in (folder, *folder.parents):
            found += [
                limit
                for name in limit_names
                if (limit := _cgroup_limit(mount / part, name, usage_name, prefix)) is not None
            ]
    return found


def _cgroup_limit(folder: Path, limit_name: str, usage_name: str, prefix: str) -> Limit | None:
    try:
        text = (folder / limit_name).read_text().strip()
        usage_bytes = int((folder / usage_name).read_text())
    except (OSError, ValueError):  # the root group has no limit, and no files
        return None
    if text == "max" or int(text) >= _NO_LIMIT:
        return None
    limit_bytes = int(text)
    available_bytes = min(limit_bytes, max(0, limit_bytes - usage_bytes + _file_cache_bytes(folder, prefix)))
    return Limit(
        available_bytes,
        f"the control group limit {folder / limit_name} ({in_gib(limit_bytes)})",
        "raise the memory of the container or job",
    )


def _file_cache_bytes(folder: Path, prefix: str) -> int:
    """Return how much of a group's use is file cache, which is given back before anything is killed."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    names = (prefix + "active_file", prefix + "inactive_file")
    return sum(int(value) for name, _, value in (line.partition(" ") for line in lines) if name in names)
