import gc
import mmap
import re
import threading
import weakref
from pathlib import Path

import pytest
import torch

from forebay.host import HostMemoryError, HostSlab, Ledger, Tier
from forebay.host import slab as slab_module
from forebay.host.slab import _PIECE_BYTES

GIB, MIB = 2**30, 2**20


class Driver:
    """Registers memory as a CUDA driver does: refuses overlaps, and what is not registered."""

    def __init__(self, error=None):
        self.error = error
        self.registered = {}
        self.calls = []

    def register(self, address, num_bytes):
        self.calls.append(("register", address, num_bytes))
        if self.error is not None:
            raise self.error
        assert address % mmap.PAGESIZE == 0
        for other, other_bytes in self.registered.items():
            assert address + num_bytes <= other or other + other_bytes <= address
        assert is_mapped(address, num_bytes)
        self.registered[address] = num_bytes

    def unregister(self, address):
        # While it is still mapped: a driver faults, or keeps a stale mapping, otherwise.
        assert is_mapped(address, self.registered[address])
        self.calls.append(("unregister", address))
        del self.registered[address]


def smaps(address, field):
    """Return a field of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith(field + ":"):
            return line.split()[1:]
    raise AssertionError(f"{address:#x} is not mapped")


def is_mapped(address, num_bytes):
    """Tell whether one mapping holds all of the memory; what is mapped into a gap later is smaller."""
    with Path("/proc/self/maps").open() as file:
        for line in file:
            start, end = (int(text, 16) for text in line.split()[0].split("-"))
            if start <= address and address + num_bytes <= end:
                return True
    return False


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in ("FOREBAY_HOST_MEMORY_GIB", "FOREBAY_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def pinned(driver, ledger, num_bytes, purpose="optimizer_state", **arguments):
    return HostSlab(
        num_bytes,
        purpose=purpose,
        ledger=ledger,
        register=driver.register,
        unregister=driver.unregister,
        **arguments,
    )


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, 3 * MIB + 5])
def test_exact_size_zeros_and_account(num_bytes):
    driver, ledger = Driver(), Ledger()
    slab = pinned(driver, ledger, num_bytes)
    assert slab.pinned
    assert slab.tensor.dtype == torch.uint8
    assert slab.tensor.shape == (num_bytes,)
    assert slab.tensor.data_ptr() % mmap.PAGESIZE == 0
    assert not slab.tensor.any()
    slab.tensor.fill_(7)  # to the last byte
    assert driver.registered == {slab.tensor.data_ptr(): num_bytes}
    assert ledger.snapshot()["pinned"] == {"optimizer_state": num_bytes}
    slab.close()
    assert driver.registered == {}
    assert ledger.num_bytes() == 0
    assert ledger.peak_bytes(Tier.PINNED) == num_bytes


def test_pageable():
    ledger = Ledger()
    slab = HostSlab(8192, purpose="gradients", ledger=ledger)
    assert not slab.pinned
    assert ledger.snapshot() == {"device": {}, "pinned": {}, "pageable": {"gradients": 8192}}
    slab.close()
    assert ledger.num_bytes() == 0


def test_a_closed_slab():
    slab = HostSlab(8192, purpose="gradients", ledger=Ledger())
    assert not slab.closed
    slab.close()
    slab.close()
    assert slab.closed
    with pytest.raises(AssertionError, match="gradients: the slab is closed"):
        _ = slab.tensor


def test_dropping_a_slab_closes_it():
    driver, ledger = Driver(), Ledger()
    slab = pinned(driver, ledger, 8192)
    del slab
    assert driver.registered == {}
    assert ledger.num_bytes() == 0


VIEWS = {
    "slice": lambda tensor: tensor[100:104],
    "dtype": lambda tensor: tensor[100:104].view(torch.int32),
    "numpy": lambda tensor: tensor.numpy()[100:104],
    "detached parameter": lambda tensor: torch.nn.Parameter(tensor[:400].view(torch.float32)).detach(),
    "storage": lambda tensor: tensor.untyped_storage(),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_outlives_close(kind):
    driver, ledger = Driver(), Ledger()
    slab = pinned(driver, ledger, 4 * MIB)
    slab.tensor[100:104] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    address = slab.tensor.data_ptr()
    view = VIEWS[kind](slab.tensor)
    slab.close()
    del slab
    gc.collect()
    assert driver.registered == {address: 4 * MIB}
    assert ledger.num_bytes(Tier.PINNED) == 4 * MIB  # in use for as long as it is
    if kind == "dtype":
        assert view.item() == 0x04030201
    elif kind != "storage":
        view.sum()
    assert is_mapped(address, 4 * MIB)
    del view
    assert driver.calls[-1] == ("unregister", address)
    assert driver.registered == {}
    assert ledger.num_bytes() == 0
    assert not is_mapped(address, 4 * MIB)


def test_the_last_view_may_die_in_another_thread():
    driver, ledger = Driver(), Ledger()
    slab = pinned(driver, ledger, 8192)
    views = [slab.tensor[5:]]
    slab.close()
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert driver.registered == {}
    assert ledger.num_bytes() == 0


def test_the_last_view_may_die_in_a_cycle():
    driver, ledger = Driver(), Ledger()
    slab = pinned(driver, ledger, 8192)
    cycle = [slab.tensor]
    cycle.append(cycle)
    slab.close()
    del cycle
    assert driver.registered
    gc.collect()
    assert driver.registered == {}
    assert ledger.num_bytes() == 0


def test_a_failing_unregister_still_leaves_the_ledger(monkeypatch):
    seen = []
    monkeypatch.setattr("sys.unraisablehook", seen.append)
    monkeypatch.setattr("sys.excepthook", lambda *error: seen.append(error))
    ledger = Ledger()

    def unregister(address):
        raise RuntimeError("CUDA error 4 (driver shutting down)")

    slab = HostSlab(8192, purpose="x", ledger=ledger, register=lambda address, n: None, unregister=unregister)
    slab.close()
    assert len(seen) == 1
    assert ledger.num_bytes() == 0


@pytest.mark.parametrize("error", [RuntimeError("CUDA error 2 (out of memory)"), OSError(12, "Cannot allocate memory")])
def test_registering_fails(error):
    driver, ledger = Driver(error), Ledger()
    with pytest.raises(HostMemoryError) as caught:
        pinned(driver, ledger, 2 * GIB // 64, setting_hint="lower x.y")
    assert str(caught.value) == (
        f"pinning 0.0312 GiB of host memory for optimizer state failed: {error}; nothing stays allocated. Raise the "
        "limit on locked memory (ulimit -l, or --ulimit memlock=-1 for a container), lower x.y, or turn pinning off "
        "(optimizer.pin_cpu_params=False, optimizer.pin_cpu_grads=False), which is slower"
    )
    assert caught.value.__cause__ is error
    # The error is still held here, with all its frames, and the memory is gone all the same.
    assert not is_mapped(*driver.calls[0][1:])
    assert [call[0] for call in driver.calls] == ["register"]
    assert ledger.num_bytes() == ledger.peak_bytes(Tier.PINNED) == 0


def test_an_interrupted_progress_callback_leaks_nothing(monkeypatch):
    driver, ledger, ranges = Driver(), Ledger(), []
    touch = slab_module._touch

    def recording_touch(address, num_bytes, *rest):
        ranges.append((address, num_bytes))
        touch(address, num_bytes, *rest)

    monkeypatch.setattr(slab_module, "_touch", recording_touch)

    def progress(done_bytes, total_bytes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        pinned(driver, ledger, 3 * _PIECE_BYTES, progress=progress, num_threads=2)
    assert caught.value is not None
    assert not is_mapped(*ranges[0])
    assert driver.calls == []
    assert ledger.num_bytes() == 0


def test_refused_before_anything_is_mapped(monkeypatch):
    driver, ledger = Driver(), Ledger()
    monkeypatch.setattr(slab_module.mmap, "mmap", None)  # calling it would be a TypeError
    with pytest.raises(HostMemoryError) as caught:
        pinned(driver, ledger, 2**50)
    assert re.match(
        r"optimizer state needs 1048576.00 GiB of pinned host memory, but only .* nothing was allocated. "
        r"To need less, lower optimizer.optimizer_offload_fraction; to have more, ",
        str(caught.value),
    )
    assert driver.calls == []
    assert ledger.num_bytes() == 0


def test_the_budget_counts_what_the_ledger_has_on_the_host():
    ledger = Ledger()
    ledger.add(Tier.PAGEABLE, "gradients", 3000)
    ledger.add(Tier.DEVICE, "weights", 10**9)
    first = HostSlab(4000, purpose="weights", ledger=ledger, budget_bytes=10_000)
    with pytest.raises(HostMemoryError, match=r"the host memory budget, of which 6.52e-06 GiB are in use"):
        HostSlab(3001, purpose="weights", ledger=ledger, budget_bytes=10_000)
    HostSlab(3000, purpose="weights", ledger=ledger, budget_bytes=10_000)
    first.close()
    HostSlab(7000, purpose="weights", ledger=ledger, budget_bytes=10_000)


def test_mapping_fails(monkeypatch):
    def refuse(*arguments, **more):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(slab_module.mmap, "mmap", refuse)
    with pytest.raises(HostMemoryError) as caught:
        HostSlab(GIB // 2, purpose="optimizer_state", ledger=Ledger())
    assert str(caught.value) == (
        "mapping 0.50 GiB of host memory for optimizer state failed: [Errno 12] Cannot allocate memory; nothing was "
        "allocated. Raise the limit on address space (ulimit -v) or let memory be overcommitted "
        "(vm.overcommit_memory), or lower optimizer.optimizer_offload_fraction"
    )


@pytest.mark.parametrize("num_threads", [None, 1, 3])
def test_every_page_is_there_before_it_is_registered_and_progress_is_told(num_threads):
    seen, resident = [], []
    num_bytes = 2 * _PIECE_BYTES + 4097

    def register(address, n):
        assert seen[-1] == (num_bytes, num_bytes)
        resident.append(int(smaps(address, "Rss")[0]) * 1024)

    slab = HostSlab(
        num_bytes,
        purpose="x",
        ledger=Ledger(),
        register=register,
        unregister=lambda address: None,
        progress=lambda done, total: seen.append((done, total)),
        num_threads=num_threads,
    )
    assert seen == [(_PIECE_BYTES, num_bytes), (2 * _PIECE_BYTES, num_bytes), (num_bytes, num_bytes)]
    assert resident[0] >= num_bytes
    slab.close()


def test_advice():
    huge = pinned(Driver(), Ledger(), 4 * MIB)
    flags = smaps(huge.tensor.data_ptr(), "VmFlags")
    assert "wf" in flags  # a fork gets zeros instead of a copy
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        assert "hg" in flags
    pageable = HostSlab(MIB, purpose="x", ledger=Ledger())
    flags = smaps(pageable.tensor.data_ptr(), "VmFlags")
    assert "wf" not in flags
    assert "hg" not in flags


def test_a_forked_process_leaves_the_registration_to_its_parent(monkeypatch):
    driver, ledger = Driver(), Ledger()
    slab = pinned(driver, ledger, 8192)
    monkeypatch.setattr(slab_module.os, "getpid", lambda: -1)
    slab.close()
    assert len(driver.registered) == 1
    assert ledger.num_bytes() == 8192


def test_numa_node(monkeypatch):
    ledger = Ledger()
    assert HostSlab(4096, purpose="x", ledger=ledger).numa_node is None
    assert HostSlab(4096, purpose="x", ledger=ledger, numa_node=4000).numa_node is None  # no such node
    assert HostSlab(4096, purpose="x", ledger=ledger, numa_node=0).numa_node in (0, None)  # None where forbidden
    near = HostSlab(4 * MIB, purpose="x", ledger=ledger, numa_node=0)
    if near.numa_node == 0:
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
        (policy,) = (line.split()[1] for line in lines if int(line.split()[0], 16) == near.tensor.data_ptr())
        assert re.fullmatch(r"prefer[a-z ()]*:0", policy)
    calls = []
    monkeypatch.setattr(slab_module, "_prefer_node", lambda *arguments: calls.append(arguments) or True)
    slab = HostSlab(4097, purpose="x", ledger=ledger, numa_node=1)
    assert slab.numa_node == 1
    assert calls == [(slab.tensor.data_ptr(), 4097, 1)]
    monkeypatch.undo()
    monkeypatch.setattr(slab_module.platform, "machine", lambda: "riscv64")
    assert HostSlab(4096, purpose="x", ledger=ledger, numa_node=0).numa_node is None


def test_many_slabs_come_and_go():
    rng = torch.Generator().manual_seed(0)
    driver, ledger = Driver(), Ledger()
    slabs, views = [], []
    for _ in range(300):
        choice = int(torch.randint(0, 4, (1,), generator=rng))
        if choice <= 1:
            slabs.append(pinned(driver, ledger, int(torch.randint(1, 40_000, (1,), generator=rng))))
        elif choice == 2 and slabs:
            slab = slabs.pop(int(torch.randint(0, len(slabs), (1,), generator=rng)))
            if torch.rand((), generator=rng) < 0.5:
                views.append(slab.tensor[-1:])
            slab.close()
        elif views:
            views.pop(int(torch.randint(0, len(views), (1,), generator=rng)))
        assert len(driver.registered) == len(slabs) + len(views)
        assert ledger.num_bytes(Tier.PINNED) == sum(driver.registered.values())
    alive = weakref.WeakSet(slabs)
    slabs.clear()
    views.clear()
    del slab
    assert not alive
    assert driver.registered == {}
    assert ledger.num_bytes() == 0
