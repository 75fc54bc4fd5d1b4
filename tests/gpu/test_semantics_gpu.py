"""The scripts of tests/support/semantics.py on the CUDA engine, with random delays on every lane."""

from __future__ import annotations

import copy

import pytest
import torch
from semantics import DTYPES, SCRIPTS, Case, break_update, expected, finish, steps
from tiny import assert_bitwise, build, weights

import forebay
from forebay.engine import HostTaskError
from forebay.engine.cuda import CudaEngine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_offloading_changes_no_bit(script, seed):
    engine = CudaEngine(torch.device("cuda"), delay_seed=seed)
    case = Case(DTYPES[seed % len(DTYPES)], engine, seed, width=256, chunk_elements=1 << 16)
    assert_bitwise(finish(script, case), expected(script, case))


@pytest.mark.parametrize("seed", range(3))
def test_a_failed_host_update_refuses_all_that_would_go_on_until_a_checkpoint_is_loaded(seed):
    engine = CudaEngine(torch.device("cuda"), delay_seed=seed)
    model = build(torch.bfloat16, "cuda", width=256, num_blocks=1)
    optimizer = forebay.AdamW(
        model.named_parameters(), offload_fraction=1.0, placement="host", chunk_elements=1 << 16, engine=engine
    )
    optimizer.attach(model)
    steps(model, optimizer, range(2))
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    steps(model, optimizer, range(2, 5))
    expected_weights = weights(model)
    engine.synchronize()  # a task that is broken must not be running
    mend, label = break_update(optimizer, seed)
    steps(model, optimizer, [5])
    with pytest.raises(HostTaskError, match="reload the last checkpoint") as caught:
        optimizer.state_dict()  # waits for the update that fails
    assert label in str(caught.value)
    for call in (optimizer.step, optimizer.synchronize, optimizer.state_dict):
        with pytest.raises(HostTaskError):
            call()
    mend()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    steps(model, optimizer, range(2, 5))
    optimizer.synchronize()
    assert_bitwise(weights(model), expected_weights)
