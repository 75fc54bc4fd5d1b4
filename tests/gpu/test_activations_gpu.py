"""Activation offloading on the CUDA engine: the bits of plain autograd, with random delays on every lane."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import nn

import forebay
from forebay.activations import Choice, Policy
from forebay.engine.cuda import CudaEngine

pytestmark = pytest.mark.gpu

WIDTH, NUM_LAYERS, LENGTH = 1024, 6, 512
MIXED = ["offload", "recompute_offloaded_input", "recompute", "offload", "offload", "keep"]
SEEDS = [None, 0, 1, 2, 3]


@pytest.fixture(scope="module")
def model():
    """A small Llama with dropout; its eager attention gives the same bits each time, unlike the backward of flash."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        attention_dropout=0.1,
        attn_implementation="eager",
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()


def tokens(step=0, length=LENGTH):
    return torch.randint(512, (2, length), generator=torch.Generator().manual_seed(step)).cuda()


def make(model, policy="offload", *, delay_seed=None, **kwargs):
    kwargs = {"min_offloaded_tensor_size": 1 << 16, "host_slab_bytes": 1 << 26} | kwargs
    engine = CudaEngine(torch.device("cuda"), delay_seed=delay_seed)
    return forebay.offload_activations(model, policy, engine=engine, **kwargs)


def steps(model, inside, num_steps=3):
    """Return the gradients of each step."""
    torch.manual_seed(1)
    found = []
    for step in range(num_steps):
        model.zero_grad()
        with inside:
            loss = model(tokens(step), labels=tokens(step)).loss
        loss.backward()
        found.append({name: param.grad.clone() for name, param in model.named_parameters()})
    return found


def assert_equal(actual, expected):
    for step, (left, right) in enumerate(zip(actual, expected, strict=True)):
        for name, value in right.items():
            assert torch.equal(left[name], value), f"the gradient of {name} differs in step {step}"


@pytest.fixture(scope="module")
def expected(model):
    found = steps(model, contextlib.nullcontext())
    assert_equal(steps(model, contextlib.nullcontext()), found)  # else nothing here proves anything
    return found


@pytest.mark.parametrize("delay_seed", SEEDS)
@pytest.mark.parametrize("policy", [*[choice.value for choice in Choice], MIXED], ids=str)
def test_bitwise(model, expected, policy, delay_seed):
    made = make(model, policy, delay_seed=delay_seed)
    assert_equal(steps(model, made), expected)
    made.engine.synchronize()
    assert made.num_host_buffers == 0
    assert made.engine.ledger.num_bytes("device") == 0


@pytest.mark.parametrize("delay_seed", SEEDS)
@pytest.mark.parametrize(("in_flight", "prefetched"), [(0, 0), (3, 2)])
def test_windows(model, expected, in_flight, prefetched, delay_seed):
    made = make(
        model,
        Policy.uniform("offload", NUM_LAYERS, num_kept=0),
        delay_seed=delay_seed,
        num_layers_in_flight=in_flight,
        num_layers_prefetched=prefetched,
    )
    assert_equal(steps(model, made), expected)


@pytest.mark.parametrize("delay_seed", SEEDS)
def test_users_own_stream(model, expected, delay_seed):
    made = make(model, MIXED, delay_seed=delay_seed)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = steps(model, made)
    torch.cuda.current_stream().wait_stream(stream)
    assert_equal(found, expected)
    assert made.engine.traffic().down_bytes > 0


@pytest.mark.parametrize("delay_seed", SEEDS)
def test_stream_switched_inside_a_layer(delay_seed):
    """What is saved on the other stream stays; the rest is offloaded."""
    other = torch.cuda.Stream()

    class Switching(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden):
            left = self.left(hidden).tanh()
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                right = self.right(hidden).exp()
            torch.cuda.current_stream().wait_stream(other)
            right.record_stream(torch.cuda.current_stream())
            return left * right

    torch.manual_seed(0)
    layers = nn.ModuleList(Switching() for _ in range(4)).cuda()

    def step(inside):
        layers.zero_grad()
        with inside:
            hidden = torch.ones(2048, WIDTH, device="cuda", requires_grad=True) * 0.1
            for layer in layers:
                hidden = layer(hidden) * 0.1
        hidden.sum().backward()
        return [{name: param.grad.clone() for name, param in layers.named_parameters()}]

    plain = step(contextlib.nullcontext())
    made = make(layers, ["offload"] * 4, delay_seed=delay_seed)
    for _ in range(3):
        assert_equal(step(made), plain)
    assert made.engine.traffic().down_bytes > 0


@pytest.mark.parametrize("delay_seed", SEEDS)
def test_micro_batches_in_flight(model, delay_seed):
    def run(inside):
        torch.manual_seed(1)
        found = []
        for order in ([1, 0, 2], [1, 0, 2], [2, 1, 0]):
            model.zero_grad()
            with inside:
                losses = [
                    model(tokens(micro, LENGTH - 64 * micro), labels=tokens(micro, LENGTH - 64 * micro)).loss
                    for micro in range(3)
                ]
            for micro in order:
                losses[micro].backward()
            found.append({name: param.grad.clone() for name, param in model.named_parameters()})
        return found

    plain = run(contextlib.nullcontext())
    assert_equal(run(make(model, MIXED, delay_seed=delay_seed)), plain)


def test_cpu_tensors_in_the_graph():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.there, self.here = nn.Linear(512, 512).cuda(), nn.Linear(512, 512)

        def forward(self, hidden):
            return self.there(hidden).tanh() + self.here(hidden.cpu()).tanh().cuda()

    torch.manual_seed(0)
    layers = nn.ModuleList(Mixed() for _ in range(3))

    def step(inside):
        layers.zero_grad()
        with inside:
            hidden = torch.ones(512, 512, device="cuda")
            for layer in layers:
                hidden = layer(hidden)
        hidden.sum().backward()
        return [{name: param.grad.clone() for name, param in layers.named_parameters()}]

    plain = step(contextlib.nullcontext())
    assert_equal(step(make(layers, ["offload"] * 3)), plain)


def test_memory_over_many_steps(model):
    """Nothing pinned after the first step, the same device memory after each, and a lower peak."""

    def peak(inside):
        steps(model, inside, 1)
        gc.collect()
        torch.cuda.synchronize()
        start_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        steps(model, inside, 2)
        return torch.cuda.max_memory_allocated() - start_bytes

    plain_bytes = peak(contextlib.nullcontext())
    made = make(model)
    offloaded_bytes = peak(made)
    recomputed_bytes = peak(make(model, "recompute_offloaded_input"))
    assert offloaded_bytes < plain_bytes
    assert recomputed_bytes < plain_bytes
    num_allocations, sizes = made.num_pinned_allocations, []
    for step in range(100):
        with made:
            loss = model(tokens(step), labels=tokens(step)).loss
        if step % 2:
            loss.backward()
        del loss
        model.zero_grad()
        made.engine.synchronize()
        sizes.append(torch.cuda.memory_allocated())
    assert len(set(sizes[2:])) == 1
    assert made.num_pinned_allocations == num_allocations
    assert made.trim() > 0
    assert made.engine.ledger.num_bytes() == 0


@pytest.mark.parametrize("policy", ["offload", "recompute_offloaded_input"])
@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
def test_each_layer_compiled(policy):
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(4))
    layers.cuda()
    for layer in layers:
        layer.compile()

    def step(inside):
        layers.zero_grad()
        with inside:
            hidden = torch.linspace(-1, 1, 2048 * WIDTH, device="cuda").view(2048, WIDTH)
            for layer in layers:
                hidden = layer(hidden)
        hidden.square().sum().backward()
        return [{name: param.grad.clone() for name, param in layers.named_parameters()}]

    plain = step(contextlib.nullcontext())
    made = make(layers, policy)
    for _ in range(2):
        assert_equal(step(made), plain)
    assert made.engine.traffic().up_bytes > 0
