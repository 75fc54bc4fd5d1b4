"""Choosing an engine."""

from __future__ import annotations

import pytest
import torch

from forebay.engine import get_engine
from forebay.engine.cuda import CudaEngine
from forebay.engine.sim import SimEngine


def test_one_engine_per_device():
    assert isinstance(get_engine("cpu"), SimEngine)
    assert get_engine("cpu") is get_engine(torch.device("cpu"), "sim")


def test_unknown_kind():
    with pytest.raises(ValueError, match="unknown engine 'metal'; choose one of auto, cuda, sim"):
        get_engine("cpu", "metal")


def test_cuda_engine_refuses_a_cpu():
    with pytest.raises(ValueError, match="engine 'cuda' needs a CUDA device, got 'cpu'"):
        CudaEngine(torch.device("cpu"))


def test_sim_engine_refuses_a_gpu():
    with pytest.raises(ValueError, match="engine 'sim' works on the CPU, got device 'cuda:0'"):
        get_engine("cuda:0", "sim")
