"""``forebay trace``: a Perfetto trace of one steady step."""

from __future__ import annotations

import argparse

from forebay.cli import common

HELP = "write a Perfetto trace of one steady step"
NUM_GATES_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the verb takes."""
    common.add_recipe_arguments(parser)
    parser.add_argument("--warmup", metavar="N", type=int, default=5, help="steps before the traced one (default: 5)")
    common.add_output_arguments(parser, default_output="runs/trace_RECIPE")


def run(arguments: argparse.Namespace) -> int:
    """Train a few steps, write the trace and print what it shows."""
    from forebay.config.resolve import resolve
    from forebay.config.rules import validate

    if arguments.warmup < 0:
        raise ValueError(f"--warmup {arguments.warmup}: must be 0 or more; 3 steps are enough to learn the memory")
    resolved = resolve(arguments.recipe, arguments.words)
    validate(resolved.config, sources=resolved.sources)
    common.refuse_auto(resolved.config)
    folder = common.output_folder(arguments, "trace")
    # What the run writes about itself goes beside the trace, not into the folder of a real run.
    resolved.config.logger.output_dir = str(folder / "run")
    resolved.config.logger.tensorboard = False
    resolved.config.logger.progress = "none"
    resolved.config.checkpoint.save = resolved.config.checkpoint.save_interval = None

    from forebay.engine import Lane
    from forebay.report.trace import trace_run

    path = folder / "step.json"
    recording = trace_run(resolved, path, num_warmup_steps=arguments.warmup)
    step_ms = recording.window_ms[1] - recording.window_ms[0]
    gates = recording.gates()
    busy_ms = {lane.value: recording.busy_ms(lane) for lane in Lane if lane is not Lane.COMPUTE}
    result = {
        "trace": str(path),
        "step_ms": step_ms,
        "stall_ms": recording.stall_ms(),
        "busy_ms": busy_ms,
        "num_slices": len(recording.slices),
        "gates": [{"name": gate.name, "waited_ms": gate.duration_ms} for gate in gates],
    }
    lines = [
        f"trace of one step: {path}   (open it in https://ui.perfetto.dev)",
        f"  step {step_ms:.1f} ms, of it stalled {recording.stall_ms():.1f} ms; "
        + ", ".join(f"{name} busy {ms:.1f} ms" for name, ms in busy_ms.items()),
        f"  {len(gates)} gates waited" + (", the longest:" if gates else ""),
        *(f"    {gate.name}" for gate in gates[:NUM_GATES_SHOWN]),
    ]
    common.show(arguments, result, lines)
    return 0
