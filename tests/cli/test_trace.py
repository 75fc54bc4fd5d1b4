"""``forebay trace`` from the command line."""

from __future__ import annotations

import json

import pytest
import tiny_run

from forebay.cli.main import main

HOST = [
    "optimizer.optimizer_cpu_offload=True",
    "optimizer.optimizer_offload_fraction=1.0",
    "optimizer.optimizer_offload_placement=host",
]


def test_trace_of_a_steady_step(tmp_path, capsys):
    output = tmp_path / "out"
    words = tiny_run.words(tmp_path, *HOST, "train.global_batch_size=4", "train.micro_batch_size=2")
    assert main(["trace", "tiny_llama_demo", "--json", "--output", str(output), "--warmup", "3", *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["trace"] == str(output / "step.json")
    assert result["step_ms"] >= result["stall_ms"] > 0
    assert result["busy_ms"].keys() == {"down", "host", "up"}
    events = json.loads((output / "step.json").read_text())["traceEvents"]
    seen = [e["name"] for e in events if e["ph"] == "X"]
    # One step of two micro-batches.
    assert seen.count("forward model.layers.1") == seen.count("backward model.layers.1") == 2
    assert seen.count("AdamW.step") == 1
    assert "gradient of model.layers.0.mlp.up_proj.weight" in seen
    # Real runs' folders stay as they are.
    assert not (tmp_path / "run").exists()


def test_recomputation_is_shown(tmp_path, capsys):
    words = tiny_run.words(tmp_path, *HOST, "model.recompute_granularity=full")
    assert main(["trace", "tiny_llama_demo", "--quiet", "--output", str(tmp_path / "out"), *words]) == 0
    events = json.loads((tmp_path / "out" / "step.json").read_text())["traceEvents"]
    layer = next(e for e in events if e["name"] == "backward model.layers.1")
    again = [e for e in events if e["name"].startswith("recompute model.layers.1")]
    assert again
    assert all(layer["ts"] <= e["ts"] <= e["ts"] + e["dur"] <= layer["ts"] + layer["dur"] + 0.01 for e in again[:1])


def test_it_says_where_the_trace_is_and_what_waited(tmp_path, capsys):
    words = tiny_run.words(tmp_path, *HOST)
    assert main(["trace", "tiny_llama_demo", *words, "--output", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"trace of one step: {tmp_path / 'out' / 'step.json'}")
    assert "host busy" in lines[1]
    assert main(["trace", "tiny_llama_demo", *words, "--quiet", "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--warmup", "-1"], "error: --warmup -1: must be 0 or more"),
        (["train.iters=1"], "unknown key train.iters; did you mean"),
    ],
)
def test_mistakes(tmp_path, capsys, argv, message):
    assert main(["trace", "tiny_llama_demo", *argv, "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
