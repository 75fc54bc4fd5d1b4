"""How much of the device's memory visiting state may use, at every moment of a step.

Activations fill the device in forward and drain in backward; optimizer state does the opposite. One step is
profiled with no state visiting: the peak of device memory in each interval between two hooks. From then on,
visits may use in each interval what it leaves below the step's highest peak, so that they raise no peak, plus
a staging budget. Memory is counted in the order in which Python allocates, which is the order in which the
compute stream uses it.
"""

from __future__ import annotations

import itertools

from forebay.engine import Engine


class Tide:
    """Memory limits for visiting state, learned from one step.

    A step is a sequence of :meth:`tick` s, each with a key that says which hook it is, between two calls of
    :meth:`turn`. When a step's sequence differs from the profiled one, visits are held to the staging budget
    and the next step is profiled again.

    Args:
        engine: tells device memory.
        staging_bytes: what visits may add to the highest peak.
    """

    def __init__(self, engine: Engine, staging_bytes: int) -> None:
        self._engine = engine
        self._staging_bytes = staging_bytes
        self._keys: list[int] = []
        self._peaks: list[int] = []
        self._hold_limits: list[int] = []
        self._prefetch_limits: list[int] = []
        self._position = 0
        self._known = False
        self._profiling = False
        self._frozen = False

    def freeze(self) -> None:
        """Decide by what is known now, and learn nothing: a CUDA graph is captured, which no hook runs in."""
        self._frozen = True

    def thaw(self) -> None:
        """Learn again."""
        self._frozen = False
        if self._profiling:  # the step that was being profiled is not whole
            self._known, self._profiling = False, False

    def tick(self, key: int) -> tuple[int, int]:
        """Begin an interval.

        Returns:
            The bytes that visits may hold in this interval, and the bytes that visits which last until the
            step's update may hold.
        """
        if self._profiling:
            if self._frozen:
                return self._staging_bytes, self._staging_bytes
            self._peaks.append(self._engine.take_peak_bytes())
            self._keys.append(key)
            return 0, 0
        if not self._known:
            return self._staging_bytes, self._staging_bytes
        position = self._position
        self._position += 1
        if position >= len(self._keys) or self._keys[position] != key:
            self._known = self._known and self._frozen
            return self._staging_bytes, self._staging_bytes
        return self._hold_limits[position], self._prefetch_limits[position]

    @property
    def update_limit_bytes(self) -> int:
        """The bytes that visits may hold while the update runs."""
        return self._hold_limits[-1] if self._known else self._staging_bytes

    def turn(self) -> bool:
        """End a step, after its update; return whether the coming one is profiled, so no visit may outlast this."""
        if self._frozen:
            self._position = 0
            return False
        if self._profiling:
            self._peaks.append(self._engine.take_peak_bytes())
            # The first entry is what came before the first tick. Its interval has no tick to act at.
            highest = max(self._peaks)
            self._hold_limits = [highest - peak + self._staging_bytes for peak in self._peaks[1:]]
            running = itertools.accumulate(reversed(self._hold_limits), min)
            self._prefetch_limits = list(running)[::-1]
            self._known, self._profiling = bool(self._keys), False
        elif not self._known or self._position != len(self._keys):
            self._known, self._profiling = False, True
            self._keys, self._peaks = [], []
            self._engine.take_peak_bytes()
        self._position = 0
        return self._profiling
