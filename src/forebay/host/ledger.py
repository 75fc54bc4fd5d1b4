"""How many bytes are in use, by tier and purpose.

Everything that forebay allocates is entered here, so the planner, the log line and the tests read one account.
"""

from __future__ import annotations

import enum
import threading
from collections import defaultdict

GIB = 2**30


class Tier(str, enum.Enum):
    """Where memory is: on the device, or on the host, pinned or not."""

    DEVICE = "device"
    PINNED = "pinned"
    PAGEABLE = "pageable"


class Ledger:
    """Bytes in use per tier and purpose; safe to use from several threads.

    A purpose is a word: ``"optimizer_state"``, ``"master_weights"``, ``"weights"``, ``"gradients"``,
    ``"activations"``, ``"staging"`` or ``"other"``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: defaultdict[tuple[Tier, str], int] = defaultdict(int)
        self._peaks: dict[Tier, int] = dict.fromkeys(Tier, 0)

    def add(self, tier: Tier | str, purpose: str, num_bytes: int) -> None:
        """Enter an allocation."""
        tier = Tier(tier)
        with self._lock:
            self._bytes[tier, purpose] += num_bytes
            self._peaks[tier] = max(self._peaks[tier], self._sum(tier, None))

    def remove(self, tier: Tier | str, purpose: str, num_bytes: int) -> None:
        """Take an allocation out again."""
        with self._lock:
            self._bytes[Tier(tier), purpose] -= num_bytes
            assert self._bytes[Tier(tier), purpose] >= 0, f"{purpose}: more bytes freed than allocated"

    def num_bytes(self, tier: Tier | str | None = None, purpose: str | None = None) -> int:
        """Return the bytes in use, of one tier or purpose or of all."""
        with self._lock:
            return self._sum(None if tier is None else Tier(tier), purpose)

    def peak_bytes(self, tier: Tier | str) -> int:
        """Return the most bytes that were in use on a tier at once."""
        with self._lock:
            return self._peaks[Tier(tier)]

    def reset_peak(self) -> None:
        """Start new peaks from what is in use now."""
        with self._lock:
            self._peaks = {tier: self._sum(tier, None) for tier in Tier}

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Return bytes by tier and purpose, without the empty ones."""
        with self._lock:
            result: dict[str, dict[str, int]] = {tier.value: {} for tier in Tier}
            for (tier, purpose), num_bytes in sorted(self._bytes.items()):
                if num_bytes:
                    result[tier.value][purpose] = num_bytes
            return result

    def table(self) -> str:
        """Return a text table in GiB."""
        rows = [
            f"{tier:<9} {purpose:<16} {num_bytes / GIB:10.3f} GiB"
            for tier, purposes in self.snapshot().items()
            for purpose, num_bytes in purposes.items()
        ]
        return "\n".join(rows) or "nothing allocated"

    def _sum(self, tier: Tier | None, purpose: str | None) -> int:
        return sum(
            num_bytes
            for (own_tier, own_purpose), num_bytes in self._bytes.items()
            if tier in (None, own_tier) and purpose in (None, own_purpose)
        )
