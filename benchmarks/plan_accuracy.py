"""How well `forebay plan` predicts: GPU peak and step time of configurations, each trained in a process of its own.

    python benchmarks/plan_accuracy.py --output benchmarks/results/plan_accuracy.csv
    python benchmarks/plan_accuracy.py --only 1b --profile box.yaml

Wanted: the peak within 5% and the time within 15%. A row that misses is printed with what was predicted in parts, so
that the report can explain it. Run it on a quiet machine; `--profile` takes what `forebay calibrate` measured there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import environment, write_csv

from forebay.config import resolve, validate
from forebay.plan import profile as profiles
from forebay.plan.model import describe
from forebay.plan.native import NativePlanner
from forebay.plan.options import GIB
from forebay.plan.solver import choice_of

PEAK_WITHIN, TIME_WITHIN = 0.05, 0.15
_LLAMA, _QWEN_8B, _MOE = "llama_1b_pretrain", "qwen3_8b_pretrain", "qwen3_30b_a3b_pretrain"
_SHORT_MOE = "model.num_layers=6 model.max_position_embeddings=40960"


def offload(fraction: float, *more: str) -> str:
    """Return the words of optimizer offload at a fraction."""
    words = (
        "optimizer_cpu_offload=True",
        f"optimizer_offload_fraction={fraction}",
        "overlap_cpu_optimizer_d2h_h2d=True",
    )
    return " ".join(f"optimizer.{word}" for word in (*words, *more))


RECOMPUTE = "model.recompute_granularity=full"
CONFIGURATIONS: dict[str, tuple[str, str]] = {
    "1b": (_LLAMA, ""),
    "1b-offload-0.25": (_LLAMA, offload(0.25)),
    "1b-offload-0.5": (_LLAMA, offload(0.5)),
    "1b-offload-1": (_LLAMA, offload(1.0)),
    "1b-offload-1-staging": (_LLAMA, offload(1.0, "optimizer_staging_gib=3")),
    "1b-streamed": (_LLAMA, offload(1.0, "optimizer_offload_placement=streamed")),
    "1b-host": (_LLAMA, offload(1.0, "optimizer_offload_placement=host")),
    "1b-accumulation": (_LLAMA, f"train.global_batch_size=8 {offload(1.0)}"),
    "1b-recompute": (_LLAMA, RECOMPUTE),
    "1b-recompute-offload": (_LLAMA, f"{RECOMPUTE} {offload(1.0)}"),
    "1b-long": (
        _LLAMA,
        "dataset.seq_length=16384 model.max_position_embeddings=16384 train.micro_batch_size=1 "
        "train.global_batch_size=1",
    ),
    "1b-short": (_LLAMA, "dataset.seq_length=1024"),
    "8b-offload-0.5": (_QWEN_8B, f"dataset.seq_length=2048 {offload(0.5)}"),
    "8b-offload-1": (_QWEN_8B, f"dataset.seq_length=4096 {offload(1.0)}"),
    "8b-recompute-offload": (_QWEN_8B, f"dataset.seq_length=4096 {RECOMPUTE} {offload(1.0)}"),
    "moe": (_MOE, f"{_SHORT_MOE} dataset.seq_length=2048"),
    "moe-offload-0.5": (_MOE, f"{_SHORT_MOE} dataset.seq_length=2048 {offload(0.5)}"),
    "moe-offload-1": (_MOE, f"{_SHORT_MOE} dataset.seq_length=4096 {offload(1.0)}"),
}
"""The recipe and the overrides of every configuration."""


def predict(recipe: str, words: list[str], profile: profiles.Profile) -> dict[str, Any]:
    """Return the planned peak and time, whole and in parts."""
    resolved = resolve(recipe, words)
    validate(resolved.config, sources=resolved.sources)
    model = describe(resolved.config)
    estimate = NativePlanner(model, resolved.config, profile).estimate(choice_of(resolved.config, len(model.layers)))
    return {
        "peak_gib": estimate.gpu_peak_bytes / GIB,
        "step_ms": 1e3 * estimate.step_seconds,
        "host_gib": estimate.host_total_bytes / GIB,
        "parts_gib": {name: round(num_bytes / GIB, 2) for name, num_bytes in estimate.gpu_bytes.items()},
        "parts_ms": {name: round(1e3 * seconds, 1) for name, seconds in estimate.seconds.items()},
    }


def measure(recipe: str, words: list[str], num_steps: int) -> dict[str, Any]:
    """Train and return the peak and the median time of the steady steps; ``error`` if training failed."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"train.train_iters={num_steps}", f"logger.output_dir={folder}", "logger.progress=none"]
        fixed += ["dataset.eval_fraction=0", "optimizer.lr_warmup_iters=0"]
        command = [sys.executable, "-m", "forebay", "train", recipe, *words, *fixed]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:200]}
        entries = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if "loss" in entry]
    return {
        "peak_gib": max(step["device_peak_gib"] for step in steps),
        "step_ms": statistics.median(step["step_ms"] for step in steps[num_steps // 3 :]),
    }


def main() -> int:
    """Measure all configurations; 1 if any misses what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="configurations whose name starts with one of these, comma-separated"
    )
    parser.add_argument("--profile", default="h200", help="rates to plan with")
    parser.add_argument("--num-steps", type=int, default=10)
    parser.add_argument("--predict-only", action="store_true", help="train nothing")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/plan_accuracy.csv"))
    arguments = parser.parse_args()
    profile = profiles.load(arguments.profile)
    rows, num_missed = [], 0
    for name, (recipe, text) in CONFIGURATIONS.items():
        if not name.startswith(tuple(arguments.only.split(","))):
            continue
        words = text.split()
        predicted = predict(recipe, words, profile)
        row: dict[str, Any] = {
            "configuration": name,
            "recipe": recipe,
            "words": text,
            "profile": profile.name,
            "predicted_peak_gib": predicted["peak_gib"],
            "predicted_step_ms": predicted["step_ms"],
        }
        if not arguments.predict_only:
            measured = measure(recipe, words, arguments.num_steps)
            row |= {f"measured_{key}" if key != "error" else key: value for key, value in measured.items()}
            if "error" not in measured:
                row["peak_error"] = predicted["peak_gib"] / measured["peak_gib"] - 1
                row["time_error"] = predicted["step_ms"] / measured["step_ms"] - 1
                row["within"] = abs(row["peak_error"]) <= PEAK_WITHIN and abs(row["time_error"]) <= TIME_WITHIN
            num_missed += not row.get("within", False)
        print({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items() if key != "words"}, flush=True)
        if not row.get("within", False):
            print("   ", predicted["parts_gib"], predicted["parts_ms"], flush=True)
        rows.append(row | environment())
        if not arguments.predict_only:
            write_csv(arguments.output, rows)
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
