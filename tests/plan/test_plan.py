import json

import pytest

from forebay.config import resolve
from forebay.plan.options import GIB
from forebay.plan.plan import load_model, make_plan, parse_size
from forebay.plan.report import to_data, to_text

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "transformers_version": "5.0.0",
}


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 * GIB),
        ("24", 24 * GIB),
        ("24 gib", 24 * GIB),
        ("80GB", 80e9),
        ("1.5TiB", 1536 * GIB),
        ("512MiB", GIB / 2),
    ],
)
def test_sizes(text, num_bytes):
    assert parse_size(text, "--gpu-mem") == num_bytes


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "0", "24 GiB each", "nan"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=r"expected an amount of memory, for example --gpu-mem 24GiB"):
        parse_size(text, "--gpu-mem")


def test_a_model_is_a_recipe_a_folder_or_a_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert (
        load_model("llama_1b_pretrain", ["train.seed=3"]).config
        == resolve("llama_1b_pretrain", ["train.seed=3"]).config
    )
    by_folder = load_model(str(tmp_path), ["dataset.seq_length=64"])
    by_file = load_model(str(file), ["dataset.seq_length=64"])
    assert by_folder.config.model.path == str(tmp_path)
    assert "architectures" not in by_file.config.model.hf_config
    data = [to_data(make_plan(resolved, gpu_bytes=GIB)) for resolved in (by_folder, by_file)]
    assert data[0]["num_params"] == data[1]["num_params"] > 0
    assert data[0]["answers"] == data[1]["answers"]


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not JSON"), ("{}", "not a configuration of transformers, it has no model_type")],
)
def test_files_that_are_no_model(tmp_path, content, message):
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_model(str(file), [])
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_model(str(tmp_path / "gone.json"), [])
    with pytest.raises(FileNotFoundError, match=r"no config\.json in this folder"):
        load_model(str(tmp_path), [])


def _plan(*words, **options):
    return make_plan(resolve("llama_1b_pretrain", words), **{"profile_name": "h200", **options})


def test_the_text_has_every_answer_and_what_to_paste():
    plan = _plan(gpu_bytes=16 * GIB, host_bytes=64 * GIB)
    text = to_text(plan)
    for part in (
        "llama_1b_pretrain: llama, 1.10 B parameters, bf16; 2 x 4096 tokens a step",
        "engine native, 1 GPU, 16.0 GiB each, of which 14.8 GiB for torch's allocations; host 64.0 GiB a rank",
        "rates of h200 (measured): chosen",
        "no offload              no     28.7",
        "smallest possible      yes",
        "optimizer.optimizer_cpu_offload=True",
        "waiting for copies and host updates",
        "take the fastest that fits: ",
        "confidence",
        "not modelled",
    ):
        assert part in text
    data = to_data(plan)
    json.dumps(data)
    assert data["answers"]["offload"] is None
    assert data["answers"]["fastest"]["words"][0].partition("=")[0] in text


def test_advice():
    assert "it fits without offload, which is the fastest: set nothing" in to_text(_plan(gpu_bytes=80 * GIB))
    tight = to_text(_plan(gpu_bytes=4 * GIB))
    assert "it does not fit, whatever is set" in tight
    assert "the GPU lacks " in tight
    assert "- a GPU of " in tight
    assert "(a100-40, " in tight
    no_host = to_text(_plan(gpu_bytes=8 * GIB, host_bytes=GIB))
    assert "the GPU has room, the host lacks 7.9 GiB a rank" in no_host


def test_the_sequence_that_would_fit_fits():
    text = to_text(_plan("train.micro_batch_size=1", gpu_bytes=int(5.2 * GIB)))
    (length,) = [line.partition("seq_length=")[2] for line in text.splitlines() if "- dataset.seq_length=" in line]
    plan = _plan("train.micro_batch_size=1", f"dataset.seq_length={length}", gpu_bytes=int(5.2 * GIB))
    assert plan.answer.smallest.fits


def test_confidence_says_why():
    assert to_data(_plan())["confidence"]["time"].startswith("fair")
    assert to_data(_plan(profile_name="l40s"))["confidence"]["time"].startswith("low: rates from datasheets")
    megatron = to_data(_plan(engine="megatron"))["confidence"]
    assert megatron["memory"].startswith("fair: what stays is within 1%")
    slow = ["optimizer.use_torch_optimizer_for_cpu_offload=True", "optimizer.optimizer_cpu_offload=True"]
    assert "torch.optim" in to_data(_plan(*slow))["confidence"]["time"]


def test_recomputation_in_megatron_needs_a_method():
    assert "model.recompute_method=block" in to_text(_plan(engine="megatron", gpu_bytes=20 * GIB))
    assert "recompute_method" not in to_text(_plan(gpu_bytes=20 * GIB))


def test_what_cannot_be_planned():
    from forebay.plan.options import Layout

    with pytest.raises(ValueError, match="--gpus 8: forebay train runs on one GPU in this version"):
        _plan(layout=Layout(8))
    with pytest.raises(
        ValueError, match="global_batch_size=2 is not a multiple of the 16 copies of the model on 16 GPUs"
    ):
        _plan(engine="megatron", layout=Layout(16))
    with pytest.raises(ValueError, match=r"1 setting is refused\n  1. train.train_iters=0"):
        _plan("train.train_iters=0")


def test_host_memory_is_shared_by_the_ranks_of_a_machine():
    from forebay.plan.options import Layout

    plan = _plan("train.global_batch_size=32", engine="megatron", layout=Layout(16), host_bytes=800 * GIB)
    assert plan.budget.host_bytes == 100 * GIB
