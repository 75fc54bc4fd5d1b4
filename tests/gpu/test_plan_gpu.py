"""What `forebay plan` says a GPU will hold is what it holds."""

from __future__ import annotations

import gc
import json

import pytest
import torch

from forebay.config import resolve
from forebay.plan.auto import choose_fraction
from forebay.plan.model import describe
from forebay.plan.native import NativePlanner
from forebay.plan.options import GIB
from forebay.plan.profile import load
from forebay.plan.solver import choice_of
from forebay.train.trainer import train

pytestmark = pytest.mark.gpu

LLAMA = ["model.num_layers=6", "dataset.seq_length=4096"]
MOE = ["model.num_layers=2", "model.num_moe_experts=32", "dataset.seq_length=2048", "train.global_batch_size=2"]


def _offload(fraction):
    return [
        "optimizer.optimizer_cpu_offload=True",
        f"optimizer.optimizer_offload_fraction={fraction}",
        "optimizer.overlap_cpu_optimizer_d2h_h2d=True",
    ]


def _trained_peak_gib(resolved, folder):
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    assert train(resolved) == 0
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return max(entry["device_peak_gib"] for entry in entries if "loss" in entry) - before / GIB


def _resolve(recipe, words, folder):
    fixed = ["train.train_iters=5", "logger.progress=none", "logger.tensorboard=False", f"logger.output_dir={folder}"]
    return resolve(recipe, [*words, *fixed, "dataset.eval_fraction=0", "optimizer.lr_warmup_iters=0"])


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("llama_1b_pretrain", LLAMA),
        ("llama_1b_pretrain", [*LLAMA, *_offload(0.5)]),
        ("llama_1b_pretrain", [*LLAMA, *_offload(1.0)]),
        ("llama_1b_pretrain", [*LLAMA, *_offload(1.0), "train.micro_batch_size=1"]),
        ("llama_1b_pretrain", [*LLAMA, "model.recompute_granularity=full"]),
        ("llama_1b_pretrain", ["model.num_layers=6", "dataset.seq_length=256", *_offload(1.0)]),
        ("qwen3_30b_a3b_pretrain", MOE),
        ("qwen3_30b_a3b_pretrain", [*MOE, *_offload(1.0)]),
    ],
)
def test_the_peak_is_within_five_percent(tmp_path, recipe, words):
    resolved = _resolve(recipe, words, tmp_path)
    model = describe(resolved.config)
    planner = NativePlanner(model, resolved.config, load("h200"))
    planned_gib = planner.estimate(choice_of(resolved.config, len(model.layers))).gpu_peak_bytes / GIB
    assert planned_gib == pytest.approx(_trained_peak_gib(resolved, tmp_path), rel=0.05)


def test_the_chosen_fraction_keeps_to_what_it_was_given(tmp_path):
    words = [*LLAMA, "optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=auto"]
    resolved = _resolve("llama_1b_pretrain", words, tmp_path)
    available_gib = 10.0
    choose_fraction(resolved, available_gpu_bytes=int(available_gib * GIB))
    assert 0 < resolved.config.optimizer.optimizer_offload_fraction < 1
    assert _trained_peak_gib(resolved, tmp_path) <= available_gib
