"""Proof and sweep of a model, kept with the reference system's own table beside ours.

    python benchmarks/proof.py llama_1b_pretrain
    python benchmarks/proof.py qwen3_30b_a3b_4_layers

Runs `forebay verify` at full offload and `forebay sweep` over five fractions, and writes the card, the HTML report and
`comparison.md` to `benchmarks/reports/MODEL/`. Where a kernel has no deterministic form, the proof is within
tolerances.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPORTS = Path(__file__).parent / "reports"
FULL = ["optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=1.0"]
# Name, recipe, overrides, and what was done to make it fit.
MODELS = {
    "llama_1b_pretrain": ("llama_1b_pretrain", [], "the recipe as it is"),
    "qwen3_30b_a3b_4_layers": (
        "qwen3_30b_a3b_pretrain",
        ["model.num_layers=4", "train.global_batch_size=2", "train.micro_batch_size=2"],
        "the recipe cut to 4 of 48 layers, 2 sequences a step",
    ),
    "tiny_llama_demo": ("tiny_llama_demo", [], "a try-out of this script on a CPU"),
}
# Megatron Bridge's measurements with Megatron Core's HybridDeviceOptimizer: Qwen3-30B-A3B, TP2 PP2 EP4, two nodes of
# H100. Fraction, milliseconds an iteration, GB allocated.
REFERENCE = [(0.0, 996, 47.2), (0.25, 1871, 43.4), (0.5, 2484, 39.6), (0.75, 3187, 35.6), (1.0, 4189, 32.0)]


def forebay(verb: str, recipe: str, words: list[str], folder: Path) -> tuple[int, dict[str, Any]]:
    """Run a verb and return its exit code and its result."""
    command = [sys.executable, "-m", "forebay", verb, recipe, "--json", "--output", str(folder), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"forebay {verb} failed with exit code {done.returncode}")
    return done.returncode, json.loads(done.stdout)


def comparison(name: str, cut: str, verified: dict[str, Any], swept: dict[str, Any]) -> str:
    """Return the page with both tables in one."""
    about = swept["about"]
    rows = {row["fraction"]: row for row in swept["points"]}
    lines = [
        f"# {name}: {cut}",
        "",
        f"{about['device']}, {about['host_cores']} host cores; {about['num_parameters'] / 1e9:.2f} B parameters, "
        f"{about['dtype']}, {about['tokens_per_step']} tokens a step; "
        + ", ".join(f"{package} {version}" for package, version in about["versions"].items())
        + f". Made by `python benchmarks/proof.py {name}`.",
        "",
        f"Proof at full offload ([card](card.md)): **{verified['status']}**, {verified['summary']}. The HTML report is "
        "`report.html`.",
        "",
        "The reference's rows are its own: Qwen3-30B-A3B over two nodes of H100, so milliseconds and GB are of another "
        "model and machine; the slowdown is what compares.",
        "",
        "| on the host | reference ms | GB allocated | slowdown | forebay ms | GB peak | GB saved | slowdown | loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for fraction, ms, gigabytes in REFERENCE:
        row = rows[fraction]
        if row["status"] == "ok":
            ours = f"{row['iter_ms']:.0f} | {row['peak_bytes'] / 1e9:.1f} | {row['saved_bytes'] / 1e9:.1f} | "
            ours += f"{row['slowdown']:.2f} | {row['loss_match']}"
        else:
            ours = f"{row['status'].replace('_', ' ')} | - | - | - | -"
        lines.append(f"| {fraction:.0%} | {ms} | {gigabytes} | {ms / REFERENCE[0][1]:.1f} | {ours} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--output", type=Path, default=REPORTS, help="folder for a folder of this model's files")
    parser.add_argument("--steps", default="20", help="steps whose loss is compared (default: 20)")
    parser.add_argument("--timed-steps", default="20", help="steps to time (default: 20)")
    arguments = parser.parse_args()
    recipe, words, cut = MODELS[arguments.model]
    steps = ["--steps", arguments.steps, "--timed-steps", arguments.timed_steps]
    target = arguments.output / arguments.model
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        proof, sweep = Path(folder) / "proof", Path(folder) / "sweep"
        _, verified = forebay("verify", recipe, [*steps, *words, *FULL], proof)
        if any("--nondeterministic" in check["figures"] for check in verified["checks"]):
            _, verified = forebay("verify", recipe, ["--nondeterministic", *steps, *words, *FULL], proof)
        _, swept = forebay("sweep", recipe, [*steps, *words], sweep)
        for file in (proof / "card.yaml", proof / "card.md", sweep / "report.html", sweep / "sweep.json"):
            shutil.copy(file, target)
    (target / "comparison.md").write_text(comparison(arguments.model, cut, verified, swept))
    print((target / "comparison.md").read_text())


if __name__ == "__main__":
    main()
