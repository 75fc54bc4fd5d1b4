"""Dividing parameters into placements and chunks."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from forebay.optim.layout import ParamSpec, Placement, divide


def covered(chunks, params):
    seen = [[] for _ in params]
    for chunk in chunks:
        for segment in chunk.segments:
            seen[segment.param].append((segment.start, segment.stop))
    for own, param in zip(seen, params, strict=True):
        own.sort()
        assert own[0][0] == 0
        assert own[-1][1] == param.num_elements
        assert all(left[1] == right[0] for left, right in itertools.pairwise(own))


@pytest.mark.parametrize("seed", range(30))
def test_every_element_is_in_exactly_one_chunk_and_the_fraction_is_exact(seed):
    rng = random.Random(seed)
    dtypes = [torch.bfloat16, torch.float32]
    params = [ParamSpec(rng.choice([1, 63, 5000, 70000, 200001]), rng.choice(dtypes)) for _ in range(12)]
    fraction, host_share = rng.random(), rng.random()
    chunks = divide(params, offload_fraction=fraction, host_share=host_share, chunk_elements=16384)
    covered(chunks, params)
    total = sum(param.num_elements for param in params)
    by_placement = dict.fromkeys(Placement, 0)
    for chunk in chunks:
        by_placement[chunk.placement] += sum(segment.num_elements for segment in chunk.segments)
        assert chunk.num_elements <= 16384 + 64 * len(chunk.segments)
        assert all(offset % 64 == 0 for offset in chunk.offsets)
        assert {params[segment.param].dtype for segment in chunk.segments} == {chunk.dtype}
    # A cut inside a tensor is rounded to 1024 elements.
    assert abs(by_placement[Placement.DEVICE] - (1 - fraction) * total) <= 1024
    assert abs(by_placement[Placement.HOST] - fraction * host_share * total) <= 2048


def test_first_parameters_stay_and_last_go_to_the_host():
    params = [ParamSpec(4096, torch.float32)] * 4
    chunks = divide(params, offload_fraction=0.75, host_share=1 / 3, chunk_elements=4096)
    placements = [(chunk.placement, chunk.segments[0].param) for chunk in chunks]
    assert placements == [
        (Placement.DEVICE, 0),
        (Placement.STREAMED, 1),
        (Placement.STREAMED, 2),
        (Placement.HOST, 3),
    ]


@pytest.mark.parametrize(("fraction", "placement"), [(0.0, Placement.DEVICE), (1.0, Placement.STREAMED)])
def test_ends_of_the_range(fraction, placement):
    params = [ParamSpec(100, torch.bfloat16)] * 3
    chunks = divide(params, offload_fraction=fraction, host_share=0.0, chunk_elements=4096)
    assert {chunk.placement for chunk in chunks} == {placement}
    assert len(chunks) == 1
