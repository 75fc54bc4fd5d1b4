import json

import pytest

from forebay.cli.main import main
from forebay.config.rule_table import RULES


def test_accepted(capsys):
    assert main(["check", "llama_1b_pretrain"]) == 0
    assert capsys.readouterr().out.endswith(" rules: accepted\n")


def test_everything_that_is_refused_is_listed_with_its_fix(capsys):
    assert main(["check", "llama_1b_pretrain", "train.train_iters=0", "model.cuda_graph_impl=local"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("rules: 2 settings are refused")
    assert lines[1:4] == [
        "  1. train.train_iters=0 must be at least 1",
        "     fix: train.train_iters=1 or more",
        f"     rule {[rule.id for rule in RULES].index('train.train_iters_at_least_1') + 1}: "
        "train.train_iters_at_least_1",
    ]
    assert lines[4].startswith("  2. model.cuda_graph_impl=local is not available")


def test_for_megatron_as_json(capsys):
    words = ["model.cpu_offloading=True", "model.recompute_granularity=full", "model.cpu_offloding=1"]
    assert main(["check", "--engine", "megatron", "--json", *words]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["accepted"] is False
    assert [violation["rule"] for violation in report["violations"]] == ["activation_offload_recompute"]
    assert report["not_checked"] == {"model.cpu_offloding": "1"}
    assert report["hints"] == {"model.cpu_offloding": "model.cpu_offloading"}
    assert main(["check", "--engine", "megatron", *words]) == 1
    assert "  model.cpu_offloding: did you mean model.cpu_offloading?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train.seed=1"], "'train.seed=1' is an override, and there is no recipe that it changes; name one first"),
        (["llama_1b_pretrain", "train.sed=1"], "unknown key train.sed; did you mean train.seed?"),
    ],
)
def test_what_is_no_configuration(capsys, argv, message):
    assert main(["check", *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_file_of_megatron_bridge_needs_the_engine(capsys, tmp_path):
    file = tmp_path / "bridge.yaml"
    file.write_text("scheduler: {lr_warmup_iters: 3}\n")
    assert main(["check", str(file)]) == 2
    assert "Files of Megatron Bridge are checked with --engine megatron" in capsys.readouterr().err
    assert main(["check", str(file), "--engine", "megatron"]) == 0
