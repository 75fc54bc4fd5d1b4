import pytest
import torch
from transformers import LlamaConfig

from forebay.train import memory
from forebay.train.memory import DoesNotFitError, Lever
from forebay.train.model import build_on_device, build_on_meta, language_model_loss, load_hf_config, num_parameters

GIB = 2**30
PLAN = {
    "device": {
        "weights": 10 * GIB,
        "gradients": 10 * GIB,
        "activations": 3 * GIB,
        "logits": GIB,
        "optimizer_state": 20 * GIB,
    },
    "pinned": {"optimizer_state": 15 * GIB},
    "pageable": {"optimizer_state": 5 * GIB},
}
LEVERS = [
    Lever("device", "more offload", 20 * GIB, moves=True),
    Lever("device", "shorter", 4 * GIB),
    Lever("device", "trifle", GIB // 100),
    Lever("host", "less offload", 20 * GIB, moves=True),
    Lever("device", "smaller"),
    Lever("host", "smaller"),
]


def _check(device_gib, host_gib, micro_batches=2):
    memory.check_fits(
        PLAN,
        device_name="cuda:0",
        device_available=None if device_gib is None else device_gib * GIB,
        host_available=host_gib * GIB,
        num_micro_batches=micro_batches,
        levers=LEVERS,
    )


def test_the_peak_counts_what_exists_at_once():
    # 10 + 20 stay; gradients of 10 and the forward's 4 meet only when an earlier micro-batch left gradients.
    assert memory.needed_device_bytes(PLAN, num_micro_batches=1) == 40 * GIB
    assert memory.needed_device_bytes(PLAN, num_micro_batches=2) == 44 * GIB
    _check(44, 20)
    _check(40, 20, micro_batches=1)
    _check(None, 64)


def test_message_device_too_small():
    with pytest.raises(DoesNotFitError) as caught:
        _check(30, 20)
    assert str(caught.value) == (
        "this run does not fit; nothing has been allocated\n"
        "  cuda:0: needs at least 44.0 GiB, 30.0 GiB available (weights 10.0, gradients 10.0, activations 3.0, "
        "logits 1.0, optimizer state 20.0)\n"
        "  host memory: needs at least 20.0 GiB, 20.0 GiB available (optimizer state 20.0)\n"
        "  what lowers the need:\n"
        "    more offload: saves up to 20.0 GiB\n"
        "    shorter: saves up to 4.0 GiB\n"
        "    smaller"
    )


def test_message_host_too_small():
    with pytest.raises(DoesNotFitError) as caught:
        _check(44, 10)
    assert "  host memory: needs at least 20.0 GiB, 10.0 GiB available (optimizer state 20.0)\n" in str(caught.value)
    assert str(caught.value).endswith("  what lowers the need:\n    less offload: saves up to 20.0 GiB\n    smaller")


def test_moving_is_no_advice_when_both_are_too_small():
    for device_gib, host_gib in ((30, 10), (None, 10)):
        with pytest.raises(DoesNotFitError) as caught:
            _check(device_gib, host_gib)
        assert "offload" not in str(caught.value)
        assert str(caught.value).endswith("    shorter: saves up to 4.0 GiB\n    smaller")


def test_both_tiers_in_host_memory():
    with pytest.raises(DoesNotFitError) as caught:
        _check(None, 63)
    assert "host memory, which is the device tier too: needs at least 64.0 GiB, 63.0 GiB available" in str(caught.value)


def _tiny(**changed):
    fields = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    }  # fmt: skip
    return LlamaConfig(**{**fields, **changed})


@pytest.mark.parametrize("full_recompute", [False, True])
def test_activations_are_a_lower_bound_of_what_autograd_keeps(full_recompute):
    model = build_on_device(_tiny(), torch.float32, torch.device("cpu"), seed=0)
    if full_recompute:
        from forebay.train.model import enable_full_recompute

        enable_full_recompute(model)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    batch = torch.randint(0, 64, (2, 17))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        language_model_loss(model, batch, num_global_tokens=32)
    measured = sum(num_bytes for num_bytes, _ in kept.values())
    plan = memory.plan_run(model, {"device": {}}, num_tokens=32, full_recompute=full_recompute)["device"]
    # Of the three parts of the logits the gradient is not there yet, and fp32 logits are not kept twice.
    bound = plan["activations"] + plan["logits"] // 3
    assert 0.3 * measured < bound <= measured


def test_model_on_meta_takes_no_memory_and_counts_right():
    fields = {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "head_dim": 128,
    }  # fmt: skip
    model = build_on_meta(load_hf_config(fields, None), torch.bfloat16)
    assert num_parameters(model) == 30_532_122_624
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    plan = memory.plan_run(model, {"device": {}}, num_tokens=1, full_recompute=False)
    assert plan["device"]["weights"] == 2 * 30_532_122_624


def test_same_seed_same_weights():
    first, second, third = (
        build_on_device(_tiny(), torch.bfloat16, torch.device("cpu"), seed=seed) for seed in (1, 1, 2)
    )
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    assert not torch.equal(first.lm_head.weight, third.lm_head.weight)
    assert {p.dtype for p in first.parameters()} == {torch.bfloat16}
    # Rotary frequencies must not be rounded to the parameters' dtype.
    assert {buffer.dtype for buffer in first.buffers()} == {torch.float32}


def test_models_that_cannot_be_built():
    with pytest.raises(ValueError, match="transformers rejects the model configuration"):
        load_hf_config({"model_type": "no_such_model"}, None)
    with pytest.raises(ValueError, match="model type 't5' has no causal language model in transformers"):
        build_on_meta(load_hf_config({"model_type": "t5"}, None), torch.float32)
