"""Happens-before by vector clocks, and the shadow memory that finds unordered accesses.

Order follows from what was *declared* (enqueue order, events, waits), never from when work happened to run,
so a missing wait is found on every run and reported where the offending call was made. The method is that of
vector-clock race detectors (Mattern 1989; Flanagan and Freund, "FastTrack", 2009).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import torch
from torch.multiprocessing.reductions import StorageWeakRef

PYTHON = "python"

Clock = dict[str, int]


class RaceError(RuntimeError):
    """Two accesses to the same bytes, one of them a write, that no event orders."""


class Clocks:
    """One vector clock per actor; an actor is the Python thread or a lane."""

    def __init__(self) -> None:
        self._now: defaultdict[str, Clock] = defaultdict(dict)

    def tick(self, actor: str) -> int:
        """Advance ``actor`` by one and return its own time."""
        own = self._now[actor]
        own[actor] = own.get(actor, 0) + 1
        return own[actor]

    def join(self, actor: str, clock: Clock) -> None:
        """Let everything that ``clock`` has seen come before what ``actor`` does next."""
        own = self._now[actor]
        for other, time in clock.items():
            if time > own.get(other, 0):
                own[other] = time

    def snapshot(self, actor: str) -> Clock:
        """Return a copy of what ``actor`` has seen."""
        return dict(self._now[actor])


@dataclasses.dataclass
class _Access:
    begin: int
    end: int
    actor: str
    time: int
    is_write: bool
    label: str


class ShadowMemory:
    """For each storage, the accesses that a later one may still conflict with."""

    def __init__(self) -> None:
        # Keyed by the storage's address; the weak reference keeps that address from being reused while its
        # entry stands.
        self._storages: dict[int, tuple[StorageWeakRef, list[_Access]]] = {}
        self._next_sweep = 1024

    def access(
        self,
        tensor: torch.Tensor,
        *,
        actor: str,
        time: int,
        clock: Clock,
        is_write: bool,
        label: str,
        remember: bool = True,
    ) -> None:
        """Check an access by ``actor`` whose view of the past is ``clock``; raise RaceError on a conflict.

        Unless ``remember`` is False, later accesses are checked against this one.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._sweep()
            self._storages[key] = (StorageWeakRef(storage), [])
        accesses = self._storages[key][1]
        begin, end = _byte_range(tensor)
        kept = []
        for old in accesses:
            apart = old.end <= begin or end <= old.begin
            ordered = clock.get(old.actor, 0) >= old.time
            if not apart and not ordered and (is_write or old.is_write):
                raise RaceError(_message(old, actor, is_write, label))
            # An access that this one comes after, covers, and is at least as strong as, cannot be the only
            # witness of a later race.
            covered = begin <= old.begin and old.end <= end
            if not (covered and ordered and (is_write or not old.is_write)):
                kept.append(old)
        if remember:
            accesses[:] = [*kept, _Access(begin, end, actor, time, is_write, label)]

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop what is known about the storage of ``tensor``."""
        self._storages.pop(tensor.untyped_storage()._cdata, None)

    def _sweep(self) -> None:
        if len(self._storages) < self._next_sweep:
            return
        self._storages = {k: v for k, v in self._storages.items() if not v[0].expired()}
        self._next_sweep = max(1024, 2 * len(self._storages))


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    begin = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (int(last) + 1) * tensor.element_size()


def _message(old: _Access, actor: str, is_write: bool, label: str) -> str:
    def verb(write: bool) -> str:
        return "writes" if write else "reads"

    return (
        f"race: {label} on lane {actor!r} {verb(is_write)} memory that {old.label} on lane {old.actor!r} "
        f"{verb(old.is_write)}, and no event orders the two; record an event after {old.label} and wait for it "
        f"on {actor!r} before {label}"
    )
