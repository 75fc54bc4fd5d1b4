"""The scripts of tests/support/semantics.py on the CUDA engine, with random delays on every lane."""

from __future__ import annotations

import pytest
import torch
from semantics import DTYPES, SCRIPTS, Case, expected, finish
from tiny import assert_bitwise

from forebay.engine.cuda import CudaEngine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_offloading_changes_no_bit(script, seed):
    engine = CudaEngine(torch.device("cuda"), delay_seed=seed)
    case = Case(DTYPES[seed % len(DTYPES)], engine, seed, width=256, chunk_elements=1 << 16)
    assert_bitwise(finish(script, case), expected(script, case))
