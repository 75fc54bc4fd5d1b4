"""Models compiled by Inductor: offloading changes no bit, with random delays on every lane."""

from __future__ import annotations

import pytest
import torch
from tiny import assert_bitwise, build, train, weights

import forebay
from forebay.engine.cuda import CudaEngine

pytestmark = [
    pytest.mark.gpu,
    # Inductor warns about what it finds on a machine, and about itself.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    """Let Inductor add up the embedding's gradients in a fixed order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()


def run(how, *, delay_seed=None, **kwargs):
    torch._dynamo.reset()
    model = build(torch.bfloat16, "cuda", width=512)
    engine = CudaEngine(torch.device("cuda"), delay_seed=delay_seed)
    optimizer = forebay.AdamW(model.parameters(), lr=1e-3, chunk_elements=1 << 19, engine=engine, **kwargs)
    call = model
    if how == "model":
        call = torch.compile(model, fullgraph=True)
    elif how == "blocks":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, fullgraph=True)
    elif how == "model_in_place":
        model.compile()
    optimizer.attach(call)
    losses = train(call, optimizer, num_steps=8, max_norm=0.1)
    return losses, weights(model)


@pytest.mark.parametrize("how", ["model", "model_in_place", "blocks"])
def test_offloading_changes_no_bit(how):
    expected, expected_weights = run(how)
    for delay_seed, host_share in ((None, 0.5), (1, 1.0), (2, 0.0)):
        losses, actual = run(how, delay_seed=delay_seed, offload_fraction=1.0, host_share=host_share)
        assert torch.equal(losses, expected)
        assert_bitwise(actual, expected_weights)
