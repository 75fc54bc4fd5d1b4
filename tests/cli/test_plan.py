import json

import pytest

from forebay.cli.main import main


@pytest.fixture(autouse=True)
def _no_stored_profile(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_PROFILE", str(tmp_path / "none.yaml"))


def test_prints_a_plan(capsys):
    argv = ["plan", "llama_1b_pretrain", "--gpu-mem", "24GiB", "--host-mem", "64GiB", "--micro-batch", "1"]
    assert main([*argv, "--profile", "h200"]) == 0
    assert "fastest that fits" in capsys.readouterr().out
    assert main([*argv, "--seq", "2048", "--json", "optimizer.optimizer_state_dtype=bf16"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["profile"] == "rtx-3090"
    assert data["why_profile"].startswith("shipped, the nearest GPU memory")


def test_for_megatron_over_many_gpus(capsys):
    argv = ["plan", "qwen3_30b_a3b_pretrain", "--engine", "megatron", "--gpus", "64", "--tp", "2", "--pp", "2"]
    assert main([*argv, "--ep", "4", "--global-batch", "256", "--gpu-mem", "40GiB", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["layout"]["expert"] == 4
    assert data["answers"]["offload"]["words"][0] == "optimizer.optimizer_cpu_offload=True"


def test_exit_code_1_if_nothing_fits(capsys):
    assert main(["plan", "llama_1b_pretrain", "--gpu-mem", "4GiB"]) == 1
    assert "it does not fit, whatever is set" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["llama_1b_pretrain", "--gpu-mem", "much"], "--gpu-mem 'much': expected an amount of memory"),
        (["llama_1b_pretrain", "--profile", "h300"], "unknown profile 'h300'"),
        (["llama_1b_pretrain", "--gpus", "8"], "--gpus 8: forebay train runs on one GPU"),
        (["llama_1b_pretrain", "--engine", "megatron", "--gpus", "6", "--tp", "4"], "--gpus 6 is not a multiple of"),
        (["lama"], "unknown recipe 'lama'"),
    ],
)
def test_mistakes(capsys, argv, message):
    assert main(["plan", *argv]) == 2
    assert message in capsys.readouterr().err
