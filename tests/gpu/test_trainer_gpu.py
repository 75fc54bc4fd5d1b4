"""The trainer on a GPU: offloading changes no loss, and a run that stops resumes bit for bit."""

from __future__ import annotations

import json

import pytest

from forebay.config import resolve
from forebay.train.trainer import train

pytestmark = pytest.mark.gpu


def losses(folder, *words):
    resolved = resolve(
        "tiny_llama_demo",
        [
            "model.params_dtype=bf16",
            "train.eval_interval=null",
            "optimizer.lr_warmup_iters=2",
            "optimizer.lr_decay_iters=8",
            "logger.log_interval=1",
            "logger.tensorboard=False",
            f"logger.output_dir={folder}",
            *words,
        ],
    )
    assert train(resolved) == 0
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in entries if "loss" in entry]


@pytest.mark.parametrize("placement", ["auto", "streamed", "host"])
def test_offloading_changes_no_loss(tmp_path, placement):
    off = ["optimizer.optimizer_cpu_offload=False", "optimizer.optimizer_offload_fraction=0.0"]
    off += ["optimizer.optimizer_offload_placement=auto", "train.train_iters=8"]
    expected = losses(tmp_path / "resident", *off)
    words = [f"optimizer.optimizer_offload_placement={placement}", "train.train_iters=8"]
    assert losses(tmp_path / "offloaded", *words) == expected


def test_resumes_bit_for_bit(tmp_path):
    expected = losses(tmp_path / "whole", "train.train_iters=8")
    save = f"checkpoint.save={tmp_path / 'saved'}"
    first = losses(tmp_path / "first", "train.train_iters=4", save)
    second = losses(tmp_path / "second", "train.train_iters=8", f"checkpoint.load={tmp_path / 'saved'}")
    assert first + second == expected
