"""Proof that offloading changes no loss: one recipe trained at several fractions, each in a process of its own.

    python benchmarks/loss_curves.py --output benchmarks/results/loss_curves_llama_1b.csv

Deterministic algorithms are on, because the backward of attention may add in any order otherwise. Writes the loss
of every step at every fraction, and beside it (``..._summary.csv``) peak memory, milliseconds a step and the
largest difference to the first fraction.
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


def run(recipe: str, fraction: float, num_steps: int, words: list[str], folder: Path) -> list[dict[str, Any]]:
    """Train and return the metrics of every step."""
    offload = [
        f"optimizer.optimizer_cpu_offload={fraction > 0}",
        f"optimizer.optimizer_offload_fraction={fraction}",
        "optimizer.overlap_cpu_optimizer_d2h_h2d=True",
    ]
    fixed = [f"train.train_iters={num_steps}", f"logger.output_dir={folder}", "logger.progress=plain"]
    fixed.append("train.deterministic=True")
    command = [sys.executable, "-m", "forebay", "train", recipe, *offload, *fixed, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"fraction {fraction}: {done.stderr[-2000:]}")
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in entries if "loss" in entry]


def main() -> None:
    """Train at all fractions, print a table and write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="llama_1b_pretrain")
    parser.add_argument("--fractions", default="0,0.25,0.5,0.75,1")
    parser.add_argument("--num-steps", type=int, default=50)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/loss_curves_llama_1b.csv"))
    parser.add_argument("words", nargs="*", help="further key.sub=value words")
    arguments = parser.parse_args()
    fractions = [float(word) for word in arguments.fractions.split(",")]
    losses: dict[float, list[float]] = {}
    summary: list[dict[str, Any]] = []
    for fraction in fractions:
        with tempfile.TemporaryDirectory() as folder:
            steps = run(arguments.recipe, fraction, arguments.num_steps, arguments.words, Path(folder))
        losses[fraction] = [step["loss"] for step in steps]
        row = {
            "recipe": arguments.recipe,
            "fraction": fraction,
            "num_steps": len(steps),
            "peak_gib": max(step["device_peak_gib"] for step in steps),
            "pinned_gib": steps[-1]["pinned_gib"],
            "step_ms_median": statistics.median(step["step_ms"] for step in steps[5:]),
            "max_loss_delta": max(abs(a - b) for a, b in zip(losses[fraction], losses[fractions[0]], strict=True)),
            "last_loss": losses[fraction][-1],
        }
        summary.append(row | environment())
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        curves = [
            {"step": index + 1, **{f"loss_at_{f:g}": repr(losses[f][index]) for f in losses}}
            for index in range(len(losses[fractions[0]]))
        ]
        write_csv(arguments.output, curves)
        write_csv(arguments.output.with_name(arguments.output.stem + "_summary.csv"), summary)


if __name__ == "__main__":
    main()
