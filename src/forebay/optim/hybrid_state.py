"""The state of HybridDeviceOptimizer: bringing a saved one to where and what it must be, and counting its bytes."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from forebay.engine import Engine
from forebay.host.ledger import Tier
from forebay.optim.hybrid_slots import Slot

MASTER = "master_param"


class Saved:
    """One parameter's state in a state dict, hidden from ``torch.optim.Optimizer.load_state_dict``.

    torch casts every tensor that it finds to the parameter's dtype and device; for a bf16 model that would
    round fp32 moments and masters, and move the host's share to the device.
    """

    def __init__(self, state: Any) -> None:
        self.state = state


def hide_saved_state(_: Any, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state_dict`` with each parameter's state in a :class:`Saved`; a ``load_state_dict`` pre-hook."""
    state = {key: value if isinstance(value, Saved) else Saved(value) for key, value in state_dict["state"].items()}
    return {**state_dict, "state": state}


def place(slot: Slot, saved: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a saved state with each tensor of the dtype, and on the device, that a fresh state has.

    The class itself is asked what it makes for a tensor like ``slot.inner``; what it does not make (written by
    another class) goes to the same device in its own dtype.
    """
    inner = slot.inner
    like = torch.zeros((1,) * inner.dim(), dtype=inner.dtype, device=inner.device)
    fresh = slot.kind.state_after_zero_gradient(like, options)
    placed = {}
    for key, value in saved.items():
        if key == MASTER:
            continue
        model = fresh.get(key)
        if isinstance(value, torch.Tensor):
            dtype = model.dtype if isinstance(model, torch.Tensor) else value.dtype
            device = model.device if isinstance(model, torch.Tensor) else inner.device
            # Always a copy: two optimizers that share a state dict must not share memory.
            placed[key] = value.detach().to(device=device, dtype=dtype, copy=True)
        elif isinstance(model, torch.Tensor) and isinstance(value, (int, float)):
            placed[key] = torch.tensor(value, dtype=model.dtype, device=model.device)  # `step` in old checkpoints
        else:
            placed[key] = copy.deepcopy(value)
    return placed


def check_master(param: torch.Tensor, saved: Mapping[str, Any]) -> None:
    """Raise ValueError for a saved master that cannot be one of ``param``."""
    master = saved.get(MASTER)
    if master is not None and master.shape != param.shape:
        raise ValueError(
            f"the state dict's {MASTER} has shape {tuple(master.shape)} where the parameter has "
            f"{tuple(param.shape)}; it belongs to another model"
        )


def load_master(slot: Slot, saved: Mapping[str, Any]) -> bool:
    """Copy a saved master into ``slot``; return False if there is none to copy."""
    master = saved.get(MASTER)
    if not slot.has_master or master is None:
        return False
    slot.inner.copy_(master)
    return True


class StateAccount:
    """Keeps the ledger's ``optimizer_state`` equal to the bytes that the sub-optimizers allocated.

    Args:
        owner: the optimizer; its bytes leave the ledger with it.
        engine: whose ledger.
    """

    def __init__(self, owner: object, engine: Engine) -> None:
        self._ledger = engine.ledger
        self._noted: Counter[Tier] = Counter()
        weakref.finalize(owner, self._note, Counter())

    def update(self, slots: Iterable[Slot], state: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Count the states of ``slots`` anew, masters apart (they are the engine's buffers)."""
        total: Counter[Tier] = Counter()
        for slot in slots:
            tier = Tier.PAGEABLE if slot.offloaded else Tier.DEVICE
            for key, value in state.get(slot.param, {}).items():
                if key != MASTER and isinstance(value, torch.Tensor):
                    total[tier] += value.nbytes
        self._note(total)

    def _note(self, total: Counter[Tier]) -> None:
        for tier in set(total) | set(self._noted):
            change = total[tier] - self._noted[tier]
            if change > 0:
                self._ledger.add(tier, "optimizer_state", change)
            elif change < 0:
                self._ledger.remove(tier, "optimizer_state", -change)
        self._noted = Counter(total)
