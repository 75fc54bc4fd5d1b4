"""How the offloaded part of the state divides between the bus and the host's memory.

Streamed state loads the bus, state updated on the host the host's memory, and both work at the same time behind a
backward, so the division is best where they take equally long. What an element costs:

- streamed, its state goes up and comes down. With overlap both directions run at once; without, one follows the
  other. Its update on the device runs at the speed of the device's memory, fifty times that of the bus, and is left
  out.
- updated on the host, the kernel reads gradient, weight and state and writes weight and state, at the speed of the
  host's memory *while copies use it too*; then the weight goes up. Gradients have left during backward.

Time is linear in the share on both sides, so the best share is where two lines cross. How much of it hides under
the next forward depends on the model and moves both sides alike.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Sequence

import torch

from forebay.engine import Engine, Lane
from forebay.engine.measure import Copies, HostUpdate
from forebay.optim.update_rule import UpdateRule


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a machine moves and updates, in GB/s (1e9 bytes a second).

    Attributes:
        down_gbps, up_gbps: pinned copies, when only that direction runs.
        down_both_gbps, up_both_gbps: each direction, when both run.
        host_update_gbps: bytes that the host kernel reads and writes, while copies run both ways. The kernel is
            bound by memory, so in bytes it is nearly the same for all dtypes.
    """

    down_gbps: float
    up_gbps: float
    down_both_gbps: float
    up_both_gbps: float
    host_update_gbps: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            rate = getattr(self, field.name)
            if not 0 < rate < float("inf"):
                raise ValueError(f"{field.name} must be above 0 and finite, got {rate}; it is a rate in GB/s")


# One H200, PCIe 5 x16, 16 cores. The host kernel's figure is the only one that is not measured by itself: half an
# update streamed and half of it on the host at once went at 5.3 Gparam/s, about 70 GB/s for the kernel, and 69 gives
# bf16 weights with fp32 moments a host share of 0.33, the best of those that were tried (docs/log.md).
H200 = Rates(down_gbps=55.0, up_gbps=55.0, down_both_gbps=48.0, up_both_gbps=48.0, host_update_gbps=69.0)


@dataclasses.dataclass(frozen=True)
class ElementBytes:
    """The bytes of one element, on average over some parameters.

    Attributes:
        weight: of the weight, and so of its gradient.
        state: moments, master and whatever else travels with them.
    """

    weight: float
    state: float


def element_bytes(params: Sequence[torch.Tensor], rule: UpdateRule) -> ElementBytes:
    """Return what an element of ``params`` has under ``rule``; of bf16 parameters if there are none."""
    counts: dict[torch.dtype, int] = {}
    for param in params:
        counts[param.dtype] = counts.get(param.dtype, 0) + param.numel()
    total = sum(counts.values())
    if total == 0:
        counts, total = {torch.bfloat16: 1}, 1
    weight = sum(dtype.itemsize * count for dtype, count in counts.items())
    state = sum(
        field.dtype.itemsize / field.block * count
        for dtype, count in counts.items()
        for field in rule.fields(dtype).values()
    )
    return ElementBytes(weight / total, state / total)


def streamed_ns(element: ElementBytes, rates: Rates, *, overlap: bool) -> float:
    """Return nanoseconds that streaming takes an element, a number of elements being under way."""
    if overlap:
        return element.state / min(rates.up_both_gbps, rates.down_both_gbps)
    return element.state / rates.up_gbps + element.state / rates.down_gbps


def host_ns(element: ElementBytes, rates: Rates) -> float:
    """Return nanoseconds that the host's update of an element and the copy up of its weight take."""
    kernel_bytes = 3 * element.weight + 2 * element.state
    return kernel_bytes / rates.host_update_gbps + element.weight / rates.up_both_gbps


def exposed_ns(host_share: float, element: ElementBytes, rates: Rates, *, overlap: bool = True) -> float:
    """Return nanoseconds an offloaded element behind backward when ``host_share`` of them are updated on the host."""
    return max((1 - host_share) * streamed_ns(element, rates, overlap=overlap), host_share * host_ns(element, rates))


def best_host_share(element: ElementBytes, rates: Rates, *, overlap: bool = True) -> float:
    """Return the share of the offloaded elements, 0 to 1, at which :func:`exposed_ns` is least."""
    streamed, host = streamed_ns(element, rates, overlap=overlap), host_ns(element, rates)
    return streamed / (streamed + host)


# What a run moves: large enough to outgrow caches and to reach full speed, small enough to pin in a moment.
NUM_ELEMENTS = 12 * 2**20 - 9 * 1024
_COPY_BYTES = 64 * 2**20
_NUM_COPIES = 4
_NUM_ROUNDS = 3

_measured: weakref.WeakKeyDictionary[Engine, Rates] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def calibrate(engine: Engine, *, num_elements: int = NUM_ELEMENTS, copy_bytes: int = _COPY_BYTES) -> Rates:
    """Measure the rates of this machine: copies each way and both ways, and the host kernel beside them.

    Takes about a second, blocks Python, and uses 2 x 64 MiB of pinned, 2 x 64 MiB of device and 170 MiB of pageable
    memory meanwhile. The best of three rounds counts. Other work on the machine at the same time falsifies it.

    Args:
        engine: of the device.
        num_elements: how many the host kernel updates.
        copy_bytes: size of a copy.
    """
    copies = Copies(engine, copy_bytes, _NUM_COPIES)
    down, up = (copies.gbps([lane], _NUM_ROUNDS) for lane in (Lane.DOWN, Lane.UP))
    both = copies.gbps([Lane.DOWN, Lane.UP], _NUM_ROUNDS)
    update = HostUpdate(engine, num_elements)
    # Twice as many copies as the update should take, so that they run until it is over.
    host_gbps = update.gbps_beside(copies, 2 * _NUM_COPIES, _NUM_ROUNDS)
    copies.release()
    update.release()
    return Rates(down, up, both, both, host_gbps)


def calibrated(engine: Engine) -> Rates:
    """Return what :func:`calibrate` measures, measured once a process for each engine."""
    with _lock:
        if engine not in _measured:
            _measured[engine] = calibrate(engine)
        return _measured[engine]
