"""What a run in another process holds, by tier and purpose, and the same for torch's memory viewer."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path
from typing import Any

import psutil

NAME = "memory.json"  # written by forebay.train.memory_file, which is not imported: reading needs no torch
_TIERS = ("device", "pinned", "pageable")


def find_run(name: str) -> Path:
    """Return the folder of a run: a path, or the name of a recipe whose runs are in ``runs/``.

    Raises:
        FileNotFoundError: when there is no such run.
    """
    candidates = [Path(name).expanduser(), Path("runs") / name]
    for folder in candidates:
        if (folder / NAME).is_file():
            return folder
    runs = sorted(file.parent.name for file in Path("runs").glob(f"*/{NAME}"))
    known = f"runs/ has {', '.join(runs)}" if runs else "runs/ has none"
    raise FileNotFoundError(
        f"no run in {' or '.join(map(str, candidates))}: a run of forebay train writes {NAME} to its folder "
        f"(logger.output_dir); {known}"
    )


def read(folder: Path) -> dict[str, Any]:
    """Return what a run's file says, with ``state``: ``"running"``, ``"ended"`` or ``"gone"`` (without a word)."""
    found: dict[str, Any] = json.loads((folder / NAME).read_text())
    found["state"] = "ended" if found["ended"] else "running" if _is_alive(found) else "gone"
    return found


def _is_alive(found: dict[str, Any]) -> bool:
    try:
        # A number is given to another process after a while; its start tells them apart.
        return abs(psutil.Process(found["pid"]).create_time() - found["started_s"]) < 1.0
    except psutil.NoSuchProcess:
        return False


def lines(found: dict[str, Any]) -> list[str]:
    """Return the view: a line for each tier and purpose, with bars that are comparable within a tier."""
    states = {
        "running": f"running, as of {max(0.0, time.time() - found['written_s']):.0f} s ago",
        "ended": "ended",
        "gone": f"process {found['pid']} is gone; this is its last word",
    }
    result = [f"step {found['step']}/{found['total_steps']} on {found['device']}, {states[found['state']]}"]
    for tier in _TIERS:
        purposes = sorted(found["tiers"].get(tier, {}).items(), key=lambda item: -item[1])
        peak = found["peak_bytes"][tier]
        if not purposes and not peak:
            continue
        held = sum(num_bytes for _, num_bytes in purposes)
        result.append(f"{tier:<9} {_size(held):>11}   peak {_size(peak)}")
        for purpose, num_bytes in purposes:
            bar = "#" * round(30 * num_bytes / max(peak, 1))
            result.append(f"  {purpose.replace('_', ' '):<16} {_size(num_bytes):>11}  {bar}".rstrip())
    if found["device_allocated_bytes"] is not None:
        result.append(
            f"all on the GPU: allocated {_size(found['device_allocated_bytes'])}, reserved "
            f"{_size(found['device_reserved_bytes'])} of {_size(found['device_total_bytes'])}"
        )
    result.append(f"process, resident on the host: {_size(found['host_rss_bytes'])}")
    return result


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def torch_snapshot(found: dict[str, Any]) -> dict[str, Any]:
    """Return a snapshot in the format of ``torch.cuda.memory._snapshot``, each tier as a device.

    Device 0 is the device tier, 1 pinned and 2 pageable host memory. A purpose is one block; its stack has the purpose
    and the tier. Addresses are made up, one after the other.
    """
    segments: list[dict[str, Any]] = []
    traces: list[list[dict[str, Any]]] = []
    time_us = int(found["written_s"] * 1e6)
    for device, tier in enumerate(_TIERS):
        address = (device + 1) << 44
        blocks: list[dict[str, Any]] = []
        trace: list[dict[str, Any]] = []
        for purpose, num_bytes in found["tiers"].get(tier, {}).items():
            frames = [{"name": purpose, "filename": tier, "line": 0}, {"name": tier, "filename": "forebay", "line": 0}]
            start = address + sum(block["size"] for block in blocks)
            sizes = {"size": num_bytes, "requested_size": num_bytes}
            blocks.append({"address": start, **sizes, "state": "active_allocated", "frames": frames})
            entry = {"addr": start, "size": num_bytes, "stream": 0, "device": device, "time_us": time_us}
            trace.append({"action": "alloc", "frames": frames, **entry})
        traces.append(trace)
        total = sum(block["size"] for block in blocks)
        if total:
            frames = [{"name": f"{tier} tier", "filename": "forebay", "line": 0}]
            entry = {"addr": address, "size": total, "stream": 0, "device": device, "time_us": time_us}
            trace.insert(0, {"action": "segment_alloc", "frames": frames, **entry})
            segments.append(
                {
                    "device": device,
                    "address": address,
                    "total_size": total,
                    "allocated_size": total,
                    "active_size": total,
                    "requested_size": total,
                    "stream": 0,
                    "segment_type": "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": False,
                    "frames": frames,
                    "blocks": blocks,
                }
            )
    return {"segments": segments, "device_traces": traces, "allocator_settings": {}, "external_annotations": []}


def write_torch_snapshot(path: Path, found: dict[str, Any]) -> None:
    """Write :func:`torch_snapshot` as ``torch.cuda.memory._dump_snapshot`` would, for https://pytorch.org/memory_viz."""
    path.write_bytes(pickle.dumps(torch_snapshot(found)))
