"""``forebay verify``: prove on this machine that offloading changes memory and nothing else."""

from __future__ import annotations

import argparse

from forebay.cli import common

HELP = "compare a run with offloading and one without, and write a card"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the verb takes."""
    common.add_recipe_arguments(parser)
    parser.add_argument("--steps", metavar="N", type=int, default=6, help="steps to compare (default: 6)")
    parser.add_argument("--timed-steps", metavar="N", type=int, default=6, help="steps to time (default: 6)")
    parser.add_argument(
        "--max-slowdown", metavar="X", type=float, help="fail when a step takes more than X times as long"
    )
    nondeterministic = "use the kernels of the configuration and compare within tolerances, not bit for bit"
    parser.add_argument("--nondeterministic", action="store_true", help=nondeterministic)
    common.add_output_arguments(parser, default_output="runs/verify_RECIPE")


def run(arguments: argparse.Namespace) -> int:
    """Run both, print the checks, write the card; return 0 when all passed, else 1."""
    from forebay.config.resolve import resolve
    from forebay.config.rules import validate

    common.check_step_counts(arguments)
    resolved = resolve(arguments.recipe, arguments.words)
    validate(resolved.config, sources=resolved.sources)
    common.refuse_auto(resolved.config)

    from forebay.report.card import card, write_card
    from forebay.report.verify import offloads, verify

    if not offloads(resolved.config):
        raise ValueError(
            "this run offloads nothing, so there is nothing to verify; add optimizer.optimizer_cpu_offload=True "
            "optimizer.optimizer_offload_fraction=1.0"
        )
    folder = common.output_folder(arguments, "verify")
    verification = verify(
        arguments.recipe,
        arguments.words,
        resolved.config,
        folder,
        num_steps=arguments.steps,
        num_timed_steps=arguments.timed_steps,
        deterministic=not arguments.nondeterministic,
        max_slowdown=arguments.max_slowdown,
        say=common.progress(arguments),
    )
    data = card(verification, arguments.recipe, arguments.words)
    write_card(folder, data)
    lines = [check.line(number) for number, check in enumerate(verification.checks, 1)]
    lines += [f"{'verified' if verification.passed else 'FAILED'}: {data['summary']}; card: {folder / 'card.md'}"]
    common.show(arguments, {**data, "passed": verification.passed, "card": str(folder / "card.yaml")}, lines)
    return 0 if verification.passed else 1
