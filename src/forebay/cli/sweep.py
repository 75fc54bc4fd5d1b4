"""``forebay sweep``: one run at several fractions, as a table and an HTML report."""

from __future__ import annotations

import argparse
import importlib.util

from forebay.cli import common

HELP = "measure a run at several offload fractions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the verb takes."""
    common.add_recipe_arguments(parser)
    fractions = "shares of the optimizer state on the host (default: 0,0.25,0.5,0.75,1)"
    parser.add_argument("--fractions", metavar="LIST", default="0,0.25,0.5,0.75,1", help=fractions)
    parser.add_argument("--steps", metavar="N", type=int, default=20, help="steps whose loss is compared (default: 20)")
    parser.add_argument("--timed-steps", metavar="N", type=int, default=10, help="steps to time (default: 10)")
    common.add_output_arguments(parser, default_output="runs/sweep_RECIPE")


def run(arguments: argparse.Namespace) -> int:
    """Measure all points, write the report; return 0, or 1 when a point failed otherwise than for want of memory."""
    from forebay.config.resolve import resolve
    from forebay.report.sweep import parse_fractions

    fractions = parse_fractions(arguments.fractions)
    common.check_step_counts(arguments)
    resolve(arguments.recipe, arguments.words)  # a mistake is told before anything is run
    for word in arguments.words:
        if word.startswith("optimizer.optimizer_offload_fraction="):
            raise ValueError(f"override {word!r}: a sweep sets this itself; say which fractions with --fractions")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "forebay sweep draws its report with matplotlib; install it with: pip install 'forebay[report]'"
        )

    from forebay.report.html import render
    from forebay.report.plots import draw
    from forebay.report.sweep import as_json, sweep, table

    folder = common.output_folder(arguments, "sweep")
    found = sweep(
        arguments.recipe,
        arguments.words,
        fractions,
        folder,
        num_steps=arguments.steps,
        num_timed_steps=arguments.timed_steps,
        say=common.progress(arguments),
    )
    figures = draw(found)
    for name, files in figures.items():
        for kind, content in files.items():
            (folder / f"{name}.{kind}").write_bytes(content)
    report = folder / "report.html"
    report.write_text(render(found, figures), "utf-8")
    errors = [f"{p.label}: {p.result.error}" for p in found.points if p.result.error]
    common.show(arguments, {**as_json(found), "report": str(report)}, [*table(found), *errors, f"report: {report}"])
    return 1 if found.failed else 0
