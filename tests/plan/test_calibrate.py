import pytest
import torch

from forebay.engine.sim import SimEngine
from forebay.host import kernels
from forebay.plan import calibrate as module
from forebay.plan.calibrate import calibrate
from forebay.plan.profile import FIELDS, from_data, load


def test_everything_a_plan_needs_is_measured_and_can_be_read_back():
    said = []
    threads = kernels.num_threads()
    profile = calibrate(SimEngine(checked=False), scale=0.002, progress=said.append)
    assert {name for name, field in FIELDS.items() if field.is_needed} <= set(profile.numbers)
    assert all(number.kind == "measured" and number.source for number in profile.numbers.values())
    assert profile.is_measured
    assert set(profile.details["copy_gbps_by_mib"]["down_both"]) == set(module.COPY_MIB)
    assert threads in profile.details["host_update_gparam_per_s_by_threads"]
    assert kernels.num_threads() == threads
    assert {"numa", "pinned_limits", "host_kernel"} <= set(profile.details)
    assert said[0] == "pinned allocation"
    again = from_data(profile.to_data(), "x", "here")
    assert again.rates() == profile.rates()


@pytest.mark.parametrize("seed", range(50))
def test_no_copy_or_update_races(seed, monkeypatch):
    # The simulator raises where two lanes touch the same memory unordered.
    monkeypatch.setattr(module, "COPY_MIB", (1,))
    monkeypatch.setattr(module, "_NUM_ROUNDS", 1)
    engine = SimEngine(seed=seed)
    calibrate(engine, scale=0.0005)
    engine.synchronize()
    assert engine.ledger.num_bytes() == 0


def test_links_come_from_the_datasheet_of_the_same_gpu(monkeypatch):
    monkeypatch.setattr(module, "_gpu_name", lambda engine: "NVIDIA H200")
    monkeypatch.setattr(module, "_device_bytes", lambda engine: 2**30)
    for name in ("_matmul_tflops", "_device_memory_gbps"):
        monkeypatch.setattr(module, name, lambda engine, scale: 1.0)
    engine = SimEngine(checked=False)
    engine.device = torch.device("cuda", 0)
    monkeypatch.setattr(
        module, "_copy_curves", lambda engine, scale: {n: {64: 1.0} for n in ("down", "up", "down_both", "up_both")}
    )
    monkeypatch.setattr(module, "_host_updates", lambda *arguments: (1.0, {}))
    profile = calibrate(engine, scale=0.001)
    assert profile.gpu_names == ("NVIDIA H200",)
    assert profile.numbers["gpu_link_gbps"] == load("h200").numbers["gpu_link_gbps"]
    assert profile.numbers["gpu_link_gbps"].kind == "datasheet"
