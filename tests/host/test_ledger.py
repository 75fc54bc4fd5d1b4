import gc
import random
import threading

import pytest

from forebay.host import PURPOSES, Ledger, Tier

GIB = 2**30


def test_bytes_by_tier_and_purpose():
    ledger = Ledger()
    ledger.add(Tier.PINNED, "optimizer_state", 100)
    ledger.add("pinned", "gradients", 20)
    ledger.add(Tier.DEVICE, "gradients", 3)
    ledger.remove(Tier.PINNED, "optimizer_state", 60)
    assert ledger.num_bytes() == 63
    assert ledger.num_bytes(Tier.PINNED) == ledger.num_bytes("pinned") == 60
    assert ledger.num_bytes(purpose="gradients") == 23
    assert ledger.num_bytes(Tier.DEVICE, "gradients") == 3
    assert ledger.num_bytes(Tier.PAGEABLE) == ledger.num_bytes(purpose="activations") == 0
    snapshot = ledger.snapshot()
    assert snapshot == {"device": {"gradients": 3}, "pinned": {"gradients": 20, "optimizer_state": 40}, "pageable": {}}
    assert snapshot[Tier.PINNED]["optimizer_state"] == 40
    ledger.remove(Tier.DEVICE, "gradients", 3)
    assert snapshot["device"] == {"gradients": 3}  # a copy
    assert ledger.snapshot()["device"] == {}


def test_peaks_are_per_tier_and_can_be_reset():
    ledger = Ledger()
    ledger.add(Tier.PINNED, "weights", 10)
    ledger.add(Tier.PINNED, "staging", 5)
    ledger.remove(Tier.PINNED, "staging", 5)
    ledger.add(Tier.DEVICE, "staging", 7)
    assert (ledger.peak_bytes(Tier.PINNED), ledger.peak_bytes("device"), ledger.peak_bytes("pageable")) == (15, 7, 0)
    ledger.reset_peak()
    assert (ledger.peak_bytes(Tier.PINNED), ledger.peak_bytes(Tier.DEVICE)) == (10, 7)
    ledger.add(Tier.PINNED, "staging", 1)
    assert ledger.peak_bytes(Tier.PINNED) == 11


def test_never_negative():
    ledger = Ledger()
    ledger.add(Tier.PINNED, "weights", 10)
    ledger.add(Tier.DEVICE, "gradients", 10)
    with pytest.raises(AssertionError, match=r"gradients: more bytes freed than allocated on the pinned tier"):
        ledger.remove(Tier.PINNED, "gradients", 1)
    with pytest.raises(AssertionError, match=r"weights: more bytes .* \(11 freed, 10 in use\)"):
        ledger.remove(Tier.PINNED, "weights", 11)
    with pytest.raises(AssertionError, match="staging: -1 bytes allocated"):
        ledger.add(Tier.PINNED, "staging", -1)
    with pytest.raises(AssertionError, match="weights: -1 bytes freed"):
        ledger.remove(Tier.PINNED, "weights", -1)
    assert ledger.num_bytes() == 20  # a refused entry changes nothing
    ledger.remove(Tier.PINNED, "weights", 10)
    assert ledger.num_bytes() == 10


def test_unknown_tier():
    with pytest.raises(ValueError, match="'nvme' is not a valid Tier"):
        Ledger().add("nvme", "weights", 1)


def test_table():
    ledger = Ledger()
    assert ledger.table() == "nothing allocated"
    ledger.add(Tier.PINNED, "optimizer_state", 3 * GIB)
    ledger.add(Tier.PINNED, "weights", GIB // 2)
    ledger.remove(Tier.PINNED, "optimizer_state", GIB)
    ledger.add(Tier.DEVICE, "staging", GIB)
    ledger.remove(Tier.DEVICE, "staging", GIB)
    assert ledger.table() == (
        "device    in all                0.000 GiB, peak 1.000 GiB\n"
        "pinned    optimizer_state       2.000 GiB\n"
        "pinned    weights               0.500 GiB\n"
        "pinned    in all                2.500 GiB, peak 3.500 GiB"
    )


def test_threads():
    ledger = Ledger()
    start = threading.Barrier(8)

    def work(seed):
        rng = random.Random(seed)
        start.wait()
        for _ in range(500):
            tier, purpose, num_bytes = rng.choice(list(Tier)), rng.choice(PURPOSES), rng.randrange(1000)
            ledger.add(tier, purpose, num_bytes)
            ledger.remove(tier, purpose, num_bytes)
        ledger.add(Tier.PINNED, "other", seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.num_bytes() == ledger.num_bytes(Tier.PINNED, "other") == sum(range(8))


class _Garbage:
    """A cycle that takes its bytes out of the ledger when the collector finds it."""

    def __init__(self, ledger):
        self.itself, self.ledger = self, ledger
        ledger.add(Tier.PINNED, "activations", 1)

    def __del__(self):
        self.ledger.remove(Tier.PINNED, "activations", 1)


def test_a_finalizer_in_the_middle_of_an_entry():
    # The collector runs wherever something is allocated, inside the ledger too: no deadlock, no lost entry.
    ledger, threshold = Ledger(), gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for i in range(1000):
            _Garbage(ledger)
            ledger.add(Tier.PINNED, "activations", 2)
            if i % 10 == 0:
                ledger.snapshot()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert ledger.num_bytes() == 2000


class _Interrupting(int):
    """A number of bytes that enters something else in the ledger while it is being added."""

    def __radd__(self, other):
        self.ledger.add(Tier.PINNED, "weights", 5)
        return int(self) + other


def test_an_entry_in_the_middle_of_an_entry_is_not_lost():
    ledger = Ledger()
    amount = _Interrupting(7)
    amount.ledger = ledger
    ledger.add(Tier.PINNED, "weights", amount)
    assert ledger.num_bytes(Tier.PINNED, "weights") == 12
    assert ledger.peak_bytes(Tier.PINNED) == 12
