"""Copies, host tasks, events and buffers, on CUDA streams or in a simulator that looks for missing waits."""

from __future__ import annotations

import threading

import torch

from forebay.engine.base import Buffer, Engine, Event, HostTask, HostTaskError, Lane, Traffic, check_task

__all__ = ["Buffer", "Engine", "Event", "HostTask", "HostTaskError", "Lane", "Traffic", "check_task", "get_engine"]

_KINDS = ("auto", "cuda", "sim")
_engines: dict[tuple[str, torch.device], Engine] = {}
_lock = threading.Lock()


def get_engine(device: torch.device | str, kind: str = "auto") -> Engine:
    """Return this process's engine for ``device``; the same one every time.

    Args:
        device: where parameters live.
        kind: ``"cuda"``, ``"sim"``, or ``"auto"``: the engine that fits the device.

    Raises:
        ValueError: for an unknown kind, or one that cannot drive the device.
    """
    device = torch.device(device)
    if kind not in _KINDS:
        raise ValueError(f"unknown engine {kind!r}; choose one of {', '.join(_KINDS)}")
    if kind == "auto":
        kind = "cuda" if device.type == "cuda" else "sim"
    if kind == "sim" and device.type != "cpu":
        raise ValueError(f"engine 'sim' works on the CPU, got device {str(device)!r}; use engine 'cuda'")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with _lock:
        key = (kind, device)
        if key not in _engines:
            if kind == "cuda":
                from forebay.engine.cuda import CudaEngine

                _engines[key] = CudaEngine(device)
            else:
                from forebay.engine.sim import SimEngine

                _engines[key] = SimEngine(checked=False)
        return _engines[key]
