"""Policies, finding layers, entering and leaving, compiled layers, and the errors of wrong arguments."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from activation_helpers import MIXED, assert_equal, build, grads, loss_of, offload, run_apart, tokens
from torch import nn

import forebay
from forebay.activations import Choice, Policy
from forebay.activations.layers import find_layers
from forebay.activations.policy import resolve


def step(model, inside):
    with inside():
        loss = loss_of(model, tokens())
    loss.backward()
    return grads(model)


# Policies


def test_uniform():
    policy = Policy.uniform("offload", 4)
    assert policy.choices == (Choice.OFFLOAD, Choice.OFFLOAD, Choice.OFFLOAD, Choice.KEEP)
    assert policy.count(Choice.OFFLOAD) == 3
    assert Policy.uniform("recompute", 2, num_kept=5).choices == (Choice.KEEP, Choice.KEEP)
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(policy) == hash(Policy(["offload"] * 3 + ["keep"]))


def test_interleaved():
    names = [choice.value for choice in Policy.interleaved({"offload": 2, "recompute": 4}, 9).choices]
    assert names[-1] == "keep"
    assert [names.count(name) for name in ("offload", "recompute", "keep")] == [2, 4, 3]
    first, second = (index for index, name in enumerate(names) if name == "offload")
    assert second - first == 4
    for num_layers in range(1, 20):
        for num_offloaded in range(num_layers + 1):
            policy = Policy.interleaved({"offload": num_offloaded}, num_layers)
            assert policy.count(Choice.OFFLOAD) == num_offloaded
            assert len(policy.choices) == num_layers
    assert Policy.interleaved({"keep": 1, "offload": 1}, 2).choices == (Choice.OFFLOAD, Choice.KEEP)
    for counts in ({"offload": 3}, {"offload": -1}):
        with pytest.raises(ValueError, match=r"must not be negative, and not be more than the 2 layers"):
            Policy.interleaved(counts, 2)


def test_resolve():
    assert resolve("offload", 3) == Policy.uniform("offload", 3)
    assert resolve(Choice.RECOMPUTE, 3) == Policy.uniform("recompute", 3)
    assert resolve(["keep", Choice.OFFLOAD], 2) == Policy(["keep", "offload"])
    with pytest.raises(ValueError, match="the policy has 2 choices and the model 3 layers; give one choice for each"):
        resolve(["keep", "keep"], 3)


def test_unknown_choices():
    with pytest.raises(ValueError, match=r"unknown choice 'swap' .* keep, offload, recompute, recompute_offloaded_in"):
        Policy(["swap"])
    with pytest.raises(ValueError, match="unknown choice 'swap'"):
        resolve("swap", 3)
    with pytest.raises(ValueError, match="must not be negative"):
        Policy.uniform("keep", 3, num_kept=-1)


# Layers


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("LlamaConfig", "model.layers"),
        ("GPT2Config", "transformer.h"),
        ("GPTNeoXConfig", "gpt_neox.layers"),
        ("OPTConfig", "model.decoder.layers"),
        ("Qwen3MoeConfig", "model.layers"),
        ("BloomConfig", "transformer.h"),
        ("MptConfig", "transformer.blocks"),
    ],
)
def test_decoder_layers_of_transformers(name, path):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    layers = model.get_submodule(path)
    found = find_layers(model)
    assert list(found) == [f"{path}.{index}" for index in range(len(layers))]
    assert list(found.values()) == list(layers)


def test_patterns():
    model = build(3)
    assert list(find_layers(model, "layers.*")) == ["layers.0", "layers.1", "layers.2"]
    found = find_layers(model, ["layers.*.up", "layers.1"])
    assert list(found) == ["layers.0.up", "layers.1", "layers.1.up", "layers.2.up"]
    assert list(find_layers(model.layers)) == ["0", "1", "2"]
    assert list(find_layers(list(model.layers[:2]))) == ["0", "1"]
    with pytest.raises(ValueError, match=r"no module of Model has a path like 'blocks.\*'; its paths begin with embed"):
        find_layers(model, "blocks.*")
    with pytest.raises(ValueError, match=r"has no nn.ModuleList of layers; give the layers themselves, or their modul"):
        find_layers(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="patterns need the model"):
        find_layers([nn.Linear(2, 2)], "layers.*")
    with pytest.raises(ValueError, match="the list of layers is empty"):
        find_layers([])
    with pytest.raises(ValueError, match=r"layers must be nn.Module objects, got int"):
        find_layers([1])


# Entering and leaving


def test_wrong_arguments():
    model = build(2)
    with pytest.raises(ValueError, match=r"fraction must be between 0.0 and 1.0, got 1.5"):
        offload(model, fraction=1.5)
    with pytest.raises(ValueError, match="min_offloaded_tensor_size must be at least 1 element, got 0"):
        offload(model, min_offloaded_tensor_size=0)
    with pytest.raises(ValueError, match="num_layers_in_flight must not be negative, got -1"):
        offload(model, num_layers_in_flight=-1)
    with pytest.raises(ValueError, match="num_layers_prefetched must not be negative"):
        offload(model, num_layers_prefetched=-2)
    with pytest.raises(ValueError, match="host_slab_bytes must be a multiple of 256, and 1024 or more, got 1000"):
        offload(model, host_slab_bytes=1000)
    with pytest.raises(ValueError, match="a list of layers cannot be called"):
        offload(list(model.layers))(tokens())


def test_defaults_on_a_cpu():
    """With the process's own engine, and tensors above the default size."""

    def forward(model, inside):
        with inside():
            hidden = torch.ones(1100, 1000)
            for layer in model:
                hidden = layer(hidden)
        hidden.square().mean().backward()
        return grads(model)

    model = nn.ModuleList(nn.Sequential(nn.Linear(1000, 1000), nn.GELU()) for _ in range(3))
    expected = run_apart(model, forward)
    made = forebay.offload_activations(model)
    before = made.engine.traffic().down_bytes
    assert_equal(forward(model, lambda: made), expected)
    assert made.engine.traffic().down_bytes > before
    made.trim()


def test_called_as_a_wrapper():
    model = build(3)
    expected = run_apart(model, step)
    made = offload(model)
    torch.manual_seed(1)
    logits = made(tokens())
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens().flatten()).backward()
    assert_equal(grads(model), expected)
    assert made.engine.traffic().down_bytes > 0


def test_nothing_is_left_on_the_model():
    model = build(3)
    before = [dict(module.__dict__) for module in model.modules()]
    keys = list(model.state_dict())
    made = offload(model)
    with made, made:
        assert list(model.state_dict()) == keys
    assert [dict(module.__dict__) for module in model.modules()] == before
    loss_of(model, tokens()).backward()
    assert made.engine.traffic().down_bytes == 0


def test_a_copy_made_inside_is_not_offloaded():
    model = build(3)
    made = offload(model)
    with made:
        twin = copy.deepcopy(model)
        loss_of(twin, tokens()).backward()
    assert made.engine.traffic().down_bytes == 0


def test_one_layer_belongs_to_one_object():
    model = build(3)
    first, second = offload(model), offload(model)
    with first, pytest.raises(ValueError, match=r"layer 'layers.0' is offloaded by another object"), second:
        pass
    with second:
        loss_of(model, tokens()).backward()
    assert second.engine.traffic().down_bytes > 0
    # All or nothing: the layers before the one that is taken are free again.
    last = offload([model.layers[2]])
    with last, pytest.raises(ValueError, match="offloaded by another"), first:
        pass
    assert not any("_compiled_call_impl" in layer.__dict__ for layer in model.layers)


def test_policy_replaced_between_steps():
    model = build(5)
    expected = run_apart(model, step)
    made = offload(model, "keep")
    with pytest.raises(ValueError, match="the policy has 1 choices and the model 5 layers"):
        made.policy = ["keep"]
    for policy in (MIXED, "recompute", Policy.uniform("offload", 5)):
        made.policy = policy
        assert len(made.policy.choices) == 5
        model.zero_grad()
        torch.manual_seed(1)
        assert_equal(step(model, lambda: made), expected)


def test_hooks_of_the_layer_run_once():
    model = build(3)
    seen = []
    model.layers[1].register_forward_pre_hook(lambda *_: seen.append("pre"))
    model.layers[1].register_forward_hook(lambda *_: seen.append("post"))
    with offload(model):
        loss_of(model, tokens()).backward()
    assert seen == ["pre", "post"]


# Compiled layers


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch, while it traces
@pytest.mark.parametrize("how", ["method", "function"])
@pytest.mark.parametrize("policy", ["offload", "recompute_offloaded_input"])
def test_each_layer_compiled(how, policy):
    torch._dynamo.reset()
    model = build(3, dropout=0.0)
    for index, layer in enumerate(model.layers):
        if how == "method":
            layer.compile(backend="aot_eager", fullgraph=True)
        else:
            model.layers[index] = torch.compile(layer, backend="aot_eager", fullgraph=True)
    expected = step(model, lambda: torch.enable_grad())
    made = offload(model, policy)
    for _ in range(2):
        model.zero_grad()
        assert_equal(step(model, lambda: made), expected)
    assert made.engine.traffic().down_bytes > 0
    assert made.engine.traffic().up_bytes > 0
    made.engine.synchronize()
    assert made.num_host_buffers == 0
    if how == "method":
        assert model.layers[0].__dict__["_compiled_call_impl"] is not None


@pytest.mark.parametrize("how", ["method", "function"])
def test_a_model_compiled_as_a_whole_is_refused(how):
    model = build(2)
    model.head.compile(backend="aot_eager")  # beside the layers, which is fine
    with offload(model):
        pass
    if how == "method":
        model.compile(backend="aot_eager")
    else:
        model = torch.compile(model, backend="aot_eager")
    made = offload(model)
    with pytest.raises(ValueError, match=r"the model is compiled as a whole: .* Compile each layer instead"), made:
        pass
    assert not any("_compiled_call_impl" in layer.__dict__ for layer in model.layers)


def test_gradient_checkpointing_of_transformers():
    """Gradient checkpointing of `transformers` around layers that are offloaded: its recomputation stays."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)

    def causal(model, inside):
        with inside():
            loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        return grads(model)

    expected = run_apart(model, causal)
    for policy in ("offload", "recompute", "recompute_offloaded_input"):
        found = run_apart(model, causal, lambda own, choice=policy: offload(own, choice, seed=1))
        assert_equal(found, expected)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    found = run_apart(model, causal, lambda own: offload(own, "offload", seed=2))
    assert_equal(found, expected)
