import gc
import itertools
import random
import threading

import pytest
import torch

from forebay.host import HostPool, HostSlab, Ledger, Tier, size_class_bytes
from forebay.host.pool import ALIGNMENT_BYTES

KIB = 1024
SLAB = 64 * KIB


class FakeEvent:
    def __init__(self, passed=False):
        self.passed = passed

    def query(self):
        return self.passed


class FakeSlab:
    """Memory that notices being used after it was closed."""

    def __init__(self, num_bytes):
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self.closed = False

    @property
    def tensor(self):
        assert not self.closed
        return self.memory

    def close(self):
        assert not self.closed
        self.closed = True


def make(slab_bytes=SLAB):
    sizes = []

    def allocate(num_bytes):
        sizes.append(num_bytes)
        return FakeSlab(num_bytes)

    return HostPool(allocate, slab_bytes=slab_bytes), sizes


def test_size_classes():
    classes = [size_class_bytes(n) for n in (1, 256, 257, 2048, 2049, 2304, 2305, 4096, 4097, 1 << 30, (1 << 30) + 1)]
    eighth = (1 << 30) // 8
    assert classes == [256, 256, 512, 2048, 2304, 2304, 2560, 4096, 4608, 1 << 30, (1 << 30) + eighth]
    rng, seen = random.Random(0), set()
    for _ in range(20_000):
        num_bytes = rng.randrange(1, 1 << rng.randrange(1, 40))
        size = size_class_bytes(num_bytes)
        assert size >= num_bytes
        assert size % ALIGNMENT_BYTES == 0
        assert size_class_bytes(size) == size
        assert 8 * (size - num_bytes) < max(num_bytes, 8 * ALIGNMENT_BYTES)
        if 1 << 20 < size <= 1 << 21:
            seen.add(size)
    assert len(seen) == 8
    with pytest.raises(AssertionError):
        size_class_bytes(0)


def test_a_buffer_is_used_again():
    pool, sizes = make()
    first = pool.acquire(5000)
    assert first.num_bytes == 5000
    assert first.class_bytes == 5120
    assert first.tensor.shape == (5000,)
    assert first.tensor.dtype == torch.uint8
    address = first.tensor.data_ptr()
    pool.release(first)
    again = pool.acquire(5100)  # of the same class
    assert again.tensor.data_ptr() == address
    assert again.tensor.shape == (5100,)
    assert sizes == [SLAB]
    assert pool.num_allocations == 1
    assert pool.num_bytes == SLAB
    assert pool.num_out == 1


def test_views():
    pool, _ = make()
    buffer = pool.acquire(1000)
    assert buffer.view(torch.float32, 10, 8).data_ptr() == buffer.tensor.data_ptr() + 8
    assert buffer.view(torch.bfloat16, 500).shape == (500,)
    with pytest.raises(AssertionError):
        buffer.view(torch.float32, 251)  # fits the class, not the request


def test_buffers_do_not_overlap_and_are_aligned():
    pool, _ = make()
    buffers = [pool.acquire(n) for n in (1, 300, 5000, 777, 16_000, 16_000, 16_000, 90_000)]
    spans = sorted((b.tensor.data_ptr(), b.tensor.data_ptr() + b.class_bytes) for b in buffers)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    bases = [slab.slab.tensor.data_ptr() for slab in pool._slabs]
    assert all(any((start - base) % ALIGNMENT_BYTES == 0 for base in bases) for start, _ in spans)


def test_large_requests_have_slabs_of_their_own():
    pool, sizes = make()
    small = pool.acquire(SLAB // 4)
    large = pool.acquire(SLAB // 4 + 1)
    huge = pool.acquire(10 * SLAB)
    assert sizes == [SLAB, size_class_bytes(SLAB // 4 + 1), 10 * SLAB]
    for buffer in (small, large, huge):
        pool.release(buffer)
    pool.acquire(10 * SLAB)
    pool.acquire(SLAB // 4 + 1)
    assert pool.num_allocations == 3


def test_released_twice_and_used_after_release():
    pool, _ = make()
    buffer = pool.acquire(100)
    pool.release(buffer)
    with pytest.raises(AssertionError, match="the buffer was released twice"):
        pool.release(buffer)
    with pytest.raises(AssertionError, match="the buffer was released"):
        _ = buffer.tensor
    with pytest.raises(AssertionError, match="the buffer was released"):
        buffer.view(torch.uint8, 1)


def test_not_lent_again_before_every_event_has_passed():
    pool, _ = make()
    first = pool.acquire(4096)
    address = first.tensor.data_ptr()
    down, up = FakeEvent(), FakeEvent()
    pool.release(first, after=[down, up])
    assert pool.num_out == 1
    others = [pool.acquire(4096)]
    assert others[0].tensor.data_ptr() != address
    down.passed = True
    others.append(pool.acquire(4096))
    assert others[1].tensor.data_ptr() != address
    up.passed = True
    assert pool.acquire(4096).tensor.data_ptr() == address


def test_nothing_is_allocated_after_the_first_step():
    pool, _ = make()
    rng = random.Random(0)
    sizes = [rng.randrange(1, 2 * SLAB) for _ in range(50)]

    def step():
        buffers = [pool.acquire(size) for size in sizes]
        for buffer in reversed(buffers):
            pool.release(buffer, after=[FakeEvent(passed=True)])

    step()
    allocations = pool.num_allocations
    for _ in range(5):
        rng.shuffle(sizes)
        step()
    # In another order the same sizes may be carved less well, but pieces keep their class: nothing is carved.
    assert pool.num_allocations == allocations


def test_a_free_slab_is_carved_anew_for_other_sizes():
    pool, _ = make()
    for class_bytes in (4096, 4608, 5120, 8192, 256, 16_384):
        buffers = [pool.acquire(class_bytes) for _ in range(SLAB // class_bytes)]
        spans = {buffer.tensor.data_ptr() for buffer in buffers}
        assert len(spans) == len(buffers)
        for buffer in buffers:
            pool.release(buffer, after=[FakeEvent(passed=True)])
    assert pool.num_allocations == 1


def test_a_slab_with_a_pending_piece_is_not_carved_anew():
    pool, _ = make()
    event = FakeEvent()
    buffers = [pool.acquire(16_384) for _ in range(4)]
    address = buffers[0].tensor.data_ptr()
    pool.release(buffers[0], after=[event])
    for buffer in buffers[1:]:
        pool.release(buffer)
    pool.acquire(8192)
    assert pool.num_allocations == 2
    event.passed = True
    for _ in range(7):  # fills the second slab
        pool.acquire(8192)
    assert pool.acquire(8192).tensor.data_ptr() == address
    assert pool.num_allocations == 2


def test_trim():
    pool, _ = make()
    event = FakeEvent()
    kept, pending, gone = pool.acquire(3 * SLAB), pool.acquire(2 * SLAB), pool.acquire(1000)
    pool.release(pending, after=[event])
    pool.release(gone)
    assert pool.trim() == SLAB
    assert pool.num_bytes == 5 * SLAB
    assert pool.trim() == 0
    event.passed = True
    assert pool.trim() == 2 * SLAB
    kept.tensor.fill_(1)
    pool.release(kept)
    assert pool.trim() == 3 * SLAB
    assert pool.num_bytes == pool.num_out == 0
    pool.acquire(1000)  # no piece of a closed slab is left
    assert pool.num_allocations == 4


def test_a_failing_allocation_changes_nothing():
    failing = [True]

    def allocate(num_bytes):
        if failing[0]:
            raise MemoryError("no more")
        return FakeSlab(num_bytes)

    pool = HostPool(allocate, slab_bytes=SLAB)
    with pytest.raises(MemoryError, match="no more"):
        pool.acquire(100)
    assert (pool.num_allocations, pool.num_bytes, pool.num_out) == (0, 0, 0)
    failing[0] = False
    assert pool.acquire(100).num_bytes == 100


def test_released_by_a_finalizer_in_the_middle_of_anything():
    pool, _ = make()

    class Handle:
        def __init__(self):
            self.itself = self
            self.buffer = pool.acquire(1000)

        def __del__(self):
            pool.release(self.buffer, after=[FakeEvent(passed=True)])

    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(500):
            Handle()
            pool.release(pool.acquire(1000))
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert pool.num_out == 0


def test_released_while_the_pool_is_held():
    # The deterministic form of the test above: a lock in `release` would hang here.
    buffers = []

    def allocate(num_bytes):
        if buffers:
            pool.release(buffers.pop())
        return FakeSlab(num_bytes)

    pool = HostPool(allocate, slab_bytes=SLAB)
    buffers.append(pool.acquire(1000))
    pool.acquire(SLAB)
    assert pool.num_out == 1


@pytest.mark.parametrize("seed", range(10))
def test_stress(seed):
    rng = random.Random(seed)
    pool, _ = make()
    lent, events = [], []
    occupied = {}  # address -> end, of what is lent or pending
    out, peaks = {}, {}
    for step in range(600):
        action = rng.random()
        if action < 0.5 and len(lent) < 40:
            num_bytes = rng.choice([rng.randrange(1, 2000), rng.randrange(1, SLAB // 4), rng.randrange(1, SLAB)])
            buffer = pool.acquire(num_bytes)
            start, end = buffer.tensor.data_ptr(), buffer.tensor.data_ptr() + num_bytes
            assert all(end <= other or other_end <= start for other, other_end in occupied.items())
            occupied[start] = end
            buffer.tensor.fill_(step % 251)
            lent.append((buffer, step % 251))
            size = buffer.class_bytes
            out[size] = out.get(size, 0) + size
            peaks[size] = max(peaks.get(size, 0), out[size])
        elif action < 0.9 and lent:
            buffer, value = lent.pop(rng.randrange(len(lent)))
            assert bool((buffer.tensor == value).all())  # nobody else wrote here
            start, waits_for = (
                buffer.tensor.data_ptr(),
                [FakeEvent(rng.random() < 0.3) for _ in range(rng.randrange(3))],
            )
            pool.release(buffer, after=waits_for)
            events.append((start, buffer.class_bytes, waits_for))
        elif action < 0.97:
            for _, _, waits_for in events:
                for event in waits_for:
                    event.passed |= rng.random() < 0.5
        else:
            pool.trim()
        for entry in [entry for entry in events if all(event.passed for event in entry[2])]:
            events.remove(entry)
            del occupied[entry[0]]
            out[entry[1]] -= entry[1]
        assert pool.num_out == len(lent) + len(events)
        # The bound of the docstring.
        carved = sum(peak for size, peak in peaks.items() if 4 * size <= SLAB)
        own = sum(peak for size, peak in peaks.items() if 4 * size > SLAB)
        assert sum(s.num_bytes for s in pool._slabs if s.dedicated) <= own
        assert sum(s.num_bytes for s in pool._slabs if not s.dedicated) <= 4 / 3 * carved + SLAB
    for buffer, _ in lent:
        pool.release(buffer)
    for _, _, waits_for in events:
        for event in waits_for:
            event.passed = True
    pool.trim()
    assert pool.num_bytes == pool.num_out == 0


def test_threads():
    pool, _ = make()
    errors = []

    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(200):
                buffers = [pool.acquire(rng.randrange(1, 9000)) for _ in range(rng.randrange(1, 5))]
                for buffer in buffers:
                    buffer.tensor.fill_(seed)
                for buffer in buffers:
                    assert bool((buffer.tensor == seed).all())
                    pool.release(buffer, after=[FakeEvent(passed=True)])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert pool.num_out == 0


def test_with_real_slabs():
    ledger, registered = Ledger(), {}

    def allocate(num_bytes):
        return HostSlab(
            num_bytes,
            purpose="activations",
            ledger=ledger,
            register=registered.__setitem__,
            unregister=registered.pop,
        )

    pool = HostPool(allocate, slab_bytes=1 << 20)
    buffers = [pool.acquire(100_000) for _ in range(15)]  # nine fit into a slab
    assert len(registered) == pool.num_allocations == 2
    assert ledger.num_bytes(Tier.PINNED, "activations") == pool.num_bytes == 2 << 20
    view = buffers[0].view(torch.float32, 100).fill_(3)
    for buffer in buffers:
        pool.release(buffer)
    assert pool.trim() == 2 << 20
    assert len(registered) == 1  # a view that someone kept is still good
    assert view.sum() == 300
    del view
    assert registered == {}
    assert ledger.num_bytes() == 0


class AwaitedEvent(FakeEvent):
    def synchronize(self):
        self.passed = True


def test_a_waiting_acquire_blocks_rather_than_grows():
    pool, sizes = make()
    events = [AwaitedEvent(), AwaitedEvent()]
    buffers = [pool.acquire(KIB), pool.acquire(KIB)]
    addresses = [buffer.tensor.data_ptr() for buffer in buffers]
    for buffer, event in zip(buffers, events, strict=True):
        pool.release(buffer, [event])
    assert pool.acquire(KIB, wait=True).tensor.data_ptr() == addresses[0]
    assert [event.passed for event in events] == [True, False]  # no longer than it has to
    assert pool.acquire(KIB).tensor.data_ptr() not in addresses  # without `wait`, a new piece
    assert pool.acquire(KIB, wait=True).tensor.data_ptr() == addresses[1]
    assert pool.acquire(2 * KIB, wait=True).num_bytes == 2 * KIB  # nothing of this class to wait for
    assert len(sizes) == 1
