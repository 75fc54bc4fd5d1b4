"""How many bytes are in use, by tier and purpose.

Everything that forebay allocates is entered here, so the planner, the log line and the tests read one account.
"""

from __future__ import annotations

import enum
import threading
from collections import defaultdict, deque

GIB = 2**30

PURPOSES = (
    "optimizer_state",  # moments and steps
    "master_weights",  # full-precision weights, or the remainders that complete 16-bit ones
    "weights",
    "gradients",
    "spares",  # where optimizer updates are made that may be dropped
    "activations",
    "staging",  # on its way between the tiers
    "other",
)
"""The purposes that the planner knows; others may be used and are counted just the same."""


class Tier(str, enum.Enum):
    """Where memory is: on the device, or on the host, pinned or not."""

    DEVICE = "device"
    PINNED = "pinned"
    PAGEABLE = "pageable"


class Ledger:
    """Bytes in use per tier and purpose; safe to use from several threads and from finalizers.

    A purpose is a word, one of ``PURPOSES`` where one fits.
    """

    def __init__(self) -> None:
        # The garbage collector may run a finalizer, which enters something, in the middle of any method here and
        # in the same thread. So the lock is reentrant, and what a finalizer enters waits in `_changes` until the
        # change that it interrupted is complete.
        self._lock = threading.RLock()
        self._changes: deque[tuple[Tier, str, int]] = deque()
        self._applying = False
        self._bytes: defaultdict[tuple[Tier, str], int] = defaultdict(int)
        self._peaks: dict[Tier, int] = dict.fromkeys(Tier, 0)

    def add(self, tier: Tier | str, purpose: str, num_bytes: int) -> None:
        """Enter an allocation of ``num_bytes``."""
        assert num_bytes >= 0, f"{purpose}: {num_bytes} bytes allocated"
        self._change(Tier(tier), purpose, num_bytes)

    def remove(self, tier: Tier | str, purpose: str, num_bytes: int) -> None:
        """Take an allocation of ``num_bytes`` out again; more than was entered is an assertion error."""
        assert num_bytes >= 0, f"{purpose}: {num_bytes} bytes freed"
        self._change(Tier(tier), purpose, -num_bytes)

    def num_bytes(self, tier: Tier | str | None = None, purpose: str | None = None) -> int:
        """Return the bytes in use, of one tier or purpose or of all."""
        with self._lock:
            return self._sum(None if tier is None else Tier(tier), purpose)

    def peak_bytes(self, tier: Tier | str) -> int:
        """Return the most bytes that were in use on a tier at once since the last :meth:`reset_peak`."""
        with self._lock:
            return self._peaks[Tier(tier)]

    def reset_peak(self) -> None:
        """Start new peaks from what is in use now."""
        with self._lock:
            self._peaks = {tier: self._sum(tier, None) for tier in Tier}

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Return bytes by tier and purpose, without the empty ones. A :class:`Tier` is a key as good as its name."""
        with self._lock:
            # The copy holds still while a finalizer may change the original.
            entries = sorted(self._bytes.copy().items())
        result: dict[str, dict[str, int]] = {tier.value: {} for tier in Tier}
        for (tier, purpose), num_bytes in entries:
            if num_bytes:
                result[tier.value][purpose] = num_bytes
        return result

    def table(self) -> str:
        """Return a text table in GiB: a line per tier and purpose, and each tier's sum and peak."""
        lines = []
        for tier, purposes in self.snapshot().items():
            peak_bytes = self.peak_bytes(tier)
            if not purposes and not peak_bytes:
                continue
            lines += [_row(tier, purpose, num_bytes) for purpose, num_bytes in purposes.items()]
            lines.append(_row(tier, "in all", sum(purposes.values())) + f", peak {peak_bytes / GIB:.3f} GiB")
        return "\n".join(lines) or "nothing allocated"

    def _change(self, tier: Tier, purpose: str, num_bytes: int) -> None:
        with self._lock:
            self._changes.append((tier, purpose, num_bytes))
            if self._applying:  # a finalizer interrupted the loop below, which takes this change up next
                return
            self._applying = True
            try:
                while self._changes:
                    self._apply(*self._changes.popleft())
            finally:
                self._applying = False

    def _apply(self, tier: Tier, purpose: str, num_bytes: int) -> None:
        new_bytes = self._bytes[tier, purpose] + num_bytes
        assert new_bytes >= 0, (
            f"{purpose}: more bytes freed than allocated on the {tier.value} tier "
            f"({-num_bytes} freed, {self._bytes[tier, purpose]} in use)"
        )
        self._bytes[tier, purpose] = new_bytes
        self._peaks[tier] = max(self._peaks[tier], self._sum(tier, None))

    def _sum(self, tier: Tier | None, purpose: str | None) -> int:
        return sum(
            num_bytes
            for (own_tier, own_purpose), num_bytes in self._bytes.copy().items()
            if tier in (None, own_tier) and purpose in (None, own_purpose)
        )


def _row(tier: str, purpose: str, num_bytes: int) -> str:
    return f"{tier:<9} {purpose:<16} {num_bytes / GIB:10.3f} GiB"
