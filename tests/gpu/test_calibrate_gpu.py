import time

import pytest
import torch

from forebay.engine import get_engine
from forebay.plan.calibrate import calibrate
from forebay.plan.profile import from_data

pytestmark = pytest.mark.gpu


def test_measures_this_gpu_in_under_a_minute_and_leaves_nothing():
    engine = get_engine("cuda")
    before = torch.cuda.memory_allocated()
    held_bytes = engine.ledger.num_bytes()
    start = time.perf_counter()
    profile = calibrate(engine)
    # The promise of the command, not a speed: it takes a few seconds.
    assert time.perf_counter() - start < 60
    assert from_data(profile.to_data(), "x", "here").gpu_names == (torch.cuda.get_device_name(),)
    engine.synchronize()
    assert engine.ledger.num_bytes() == held_bytes
    assert torch.cuda.memory_allocated() == before
