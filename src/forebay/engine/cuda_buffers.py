"""Memory that the CUDA engine hands out."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from forebay.engine.base import Buffer, Event
from forebay.host.ledger import Tier
from forebay.host.slab import HostSlab

if TYPE_CHECKING:
    from forebay.engine.cuda import CudaEngine


class CudaHostBuffer(Buffer):
    """A slab of host memory."""

    def __init__(self, engine: CudaEngine, num_bytes: int, purpose: str, pinned: bool, setting_hint: str) -> None:
        self._slab = HostSlab(
            num_bytes,
            purpose=purpose,
            register=engine.runtime.register_host if pinned else None,
            unregister=engine.runtime.unregister_host if pinned else None,
            ledger=engine.ledger,
            numa_node=engine.numa_node,
            setting_hint=setting_hint,
        )
        self.tensor = self._slab.tensor
        self.purpose = purpose
        self._engine = engine

    def release(self, after: Sequence[Event] = ()) -> None:
        """See :meth:`Buffer.release`."""
        # The slab is unmapped only when the events have passed; a copy in flight would fault otherwise.
        self._engine.retire(after, self._slab)


class CudaDeviceBuffer(Buffer):
    """Memory of torch's caching allocator."""

    def __init__(self, engine: CudaEngine, num_bytes: int, purpose: str) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=engine.device)
        self.purpose = purpose
        self._engine = engine
        engine.ledger.add(Tier.DEVICE, purpose, num_bytes)
        self._unaccount = weakref.finalize(self, engine.ledger.remove, Tier.DEVICE, purpose, num_bytes)

    def release(self, after: Sequence[Event] = ()) -> None:
        """See :meth:`Buffer.release`."""
        assert self._unaccount.alive, f"{self.purpose}: buffer released twice"
        # Dropping the tensor gives its memory to the compute stream's next allocation, so it stays referenced
        # until no side stream uses it any more.
        if after:
            self._engine.retire(after, self.tensor)
        self._unaccount()
        del self.tensor
