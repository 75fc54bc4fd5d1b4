import pytest

from forebay.config import megatron_file, violations
from forebay.config.megatron_file import read

BRIDGE = """\
_target_: megatron.bridge.training.config.ConfigContainer
model:
  _target_: megatron.bridge.models.qwen.Qwen3MoEProvider
  num_layers: 48
  params_dtype: {_target_: torch.dtype, value: bfloat16}
  cpu_offloading: true
  cpu_offloading_num_layers: 24
  pipeline_model_parallel_size: 2
  recompute_granularity: null
  offload_modules: null
  moe_router_load_balancing_type: aux_loss
  rotary_base: 1.0e6
optimizer:
  optimizer: adam
  lr: 3.0e-4
  optimizer_cpu_offload: false
  decoupled_weight_decay: true
scheduler:
  lr_warmup_iters: 10
  lr_decay_style: WSD
dataset:
  sequence_length: 4096
ddp:
  use_distributed_optimizer: true
  overlap_grad_reduce: true
"""


def _write(folder, text, name="bridge.yaml"):
    file = folder / name
    file.write_text(text)
    return str(file)


def _rules(foreign):
    found = violations(foreign.resolved.config, "megatron", sources=foreign.resolved.sources)
    return [violation.rule for violation in found]


def test_a_file_of_megatron_bridge(tmp_path):
    foreign = read(_write(tmp_path, BRIDGE), [])
    config = foreign.resolved.config
    assert (config.model.cpu_offloading_num_layers, config.model.num_layers) == (24, 48)
    assert (config.optimizer.lr_warmup_iters, config.dataset.seq_length) == (10, 4096)
    assert config.model.recompute_granularity is None
    assert config.model.offload_modules == []
    assert _rules(foreign) == ["activation_offload_pp"]
    assert set(foreign.not_checked) == {
        "model.params_dtype",
        "model.moe_router_load_balancing_type",
        "model.rotary_base",
        "scheduler.lr_decay_style",
        "ddp.overlap_grad_reduce",
    }
    assert config.optimizer.optimizer == "adam"
    assert foreign.resolved.source("dataset.seq_length").startswith("file ")


def test_words_change_a_file_and_may_be_hydra_s(tmp_path):
    words = ["++model.pipeline_model_parallel_size=1", "+model.recompute_granularity=full", "model.new_key=[1,2"]
    foreign = read(_write(tmp_path, BRIDGE), words)
    assert _rules(foreign) == ["activation_offload_recompute"]
    assert foreign.not_checked["model.new_key"] == "[1,2"
    assert _rules(read(_write(tmp_path, BRIDGE), [*words, "model.recompute_granularity=null"])) == []


def test_a_list_of_overrides_as_it_was_copied(tmp_path):
    text = """\
# last week's run
torchrun --nproc-per-node 8 pretrain.py \\
  model.cpu_offloading=true model.cpu_offloading_num_layers=48 \\
  'model.offload_modules=[core_attn]' model.num_layers=48
"""
    foreign = read(_write(tmp_path, text, "overrides.txt"), [])
    assert foreign.resolved.config.model.offload_modules == ["core_attn"]
    assert _rules(foreign) == ["activation_offload_layers"]
    assert _rules(read(_write(tmp_path, text, "overrides.txt"), ["model.cpu_offloading_num_layers=47"])) == []


@pytest.mark.parametrize(
    ("ddp", "optimizer", "refused"),
    [(True, False, False), (False, None, True), (False, True, False), (None, False, True)],
)
def test_either_switch_turns_the_distributed_optimizer_on(ddp, optimizer, refused):
    words = ["optimizer.optimizer_cpu_offload=True"]
    words += [] if optimizer is None else [f"optimizer.use_distributed_optimizer={optimizer}"]
    words += [] if ddp is None else [f"ddp.use_distributed_optimizer={ddp}"]
    assert (_rules(read(None, words)) == ["optimizer_offload_distributed"]) is refused


def test_slips_are_pointed_out_and_other_keys_are_not():
    foreign = read("llama_1b_pretrain", ["model.cpu_offloding=True", "model.moe_layer_freq=1", "profiling.use_nsys=1"])
    assert foreign.hints == {"model.cpu_offloding": "model.cpu_offloading"}
    assert list(foreign.not_checked) == ["model.cpu_offloding", "model.moe_layer_freq", "profiling.use_nsys"]


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        (None, ["model.cpu_offloading=maybe"], "model.cpu_offloading must be True or False, got 'maybe'"),
        (None, ["model.cpu_offloading"], "expected key=value, for example model.cpu_offloading=True"),
        (None, ["=3"], "expected key=value"),
        ("gone.yaml", [], "file gone.yaml: no such file"),
        ("gone/overrides.txt", [], "no such file"),
        ("lama", [], "unknown recipe 'lama'"),
    ],
)
def test_what_cannot_be_read(name, words, message):
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        read(name, words)
    assert message in str(caught.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="expected sections such as train: and model:, got list"):
        read(_write(tmp_path, "[1]"), [])
    with pytest.raises(ValueError, match=r"model\.cpu_offloading must be True or False, got 3"):
        read(_write(tmp_path, "model: {cpu_offloading: 3}"), [])
    with pytest.raises(ValueError, match="not a list of overrides"):
        megatron_file.read_words(tmp_path.joinpath(_write(tmp_path, "a='b", "x.txt")))
