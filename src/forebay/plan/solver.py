"""Choosing a setting: every choice that an engine accepts, and the few that answer a question.

Memory falls linearly with the offload fraction, so for each micro-batch, activation policy and placement the least
fraction that fits is computed and not searched. What an engine accepts is asked of the table of rules, so a plan never
names what ``forebay train`` or Megatron would refuse, and what becomes available is planned with at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Protocol

from forebay.config import violations
from forebay.config.overrides import parse_word, set_value
from forebay.config.resolve import COMMAND_LINE
from forebay.config.rule import Engine
from forebay.config.schema import Config
from forebay.plan.options import Budget, Choice, Estimate
from forebay.train.optimizers import effective_fraction

_STEP = 0.01  # of fractions
_STAGING_GIB = (1.0, 3.0)


class Planner(Protocol):
    """What estimates a choice: :class:`forebay.plan.native.NativePlanner` or its counterpart for Megatron."""

    def estimate(self, choice: Choice) -> Estimate:
        """Return what a choice takes."""

    def state_bytes(self) -> int:
        """Return the bytes of optimizer state that offloading can take off the GPU."""


@dataclasses.dataclass(frozen=True)
class Option:
    """A choice with what it takes, and whether that is there."""

    choice: Choice
    estimate: Estimate
    fits: bool


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a plan says.

    Attributes:
        no_offload: the configured micro-batch and recomputation, nothing offloaded; whether it fits or not.
        offload: micro-batch and recomputation as configured, the fastest that fits by offloading alone; the run without
            offload if that fits. None: none fits.
        cheapest: of what fits, the least host memory, then the fastest. None: nothing fits.
        fastest: of what fits, the least seconds a step. None: nothing fits.
        smallest: the least GPU memory.
        least_host: of what fits the GPU, the least host memory, be it there or not. None: nothing fits the GPU.
    """

    no_offload: Option
    offload: Option | None
    cheapest: Option | None
    fastest: Option | None
    smallest: Option
    least_host: Option | None


class Solver:
    """Answers for one planner, configuration and budget.

    Args:
        planner: estimates choices.
        config: the starting point; what the plan does not decide stays as it is.
        budget: of one rank.
        engine: who will run it.
        num_data_parallel: copies of the model.
        num_stage_layers: layers of a pipeline stage.
        num_layers: of the model.
    """

    def __init__(
        self,
        planner: Planner,
        config: Config,
        budget: Budget,
        engine: Engine,
        *,
        num_layers: int,
        num_stage_layers: int,
        num_data_parallel: int = 1,
    ) -> None:
        self._planner = planner
        self._config = config
        self._budget = budget
        self._engine = engine
        self._num_layers = num_layers
        self._num_stage_layers = num_stage_layers
        self._num_data_parallel = num_data_parallel
        self._state_bytes = planner.state_bytes()

    def solve(self, *, micro_batches: list[int] | None = None) -> Answer:
        """Return the four answers.

        Args:
            micro_batches: the sizes to consider. Default: all that divide a copy's part of the global batch.
        """
        options = [self._option(choice) for choice in self._choices(micro_batches or self._micro_batches())]
        fitting = [option for option in options if option.fits]
        configured = choice_of(self._config, self._num_layers)
        configured = Choice(configured.micro_batch, recompute_layers=configured.recompute_layers)
        alone = [option for option in fitting if _differs_by_offload_only(option.choice, configured)]
        return Answer(
            no_offload=self._option(configured),
            offload=min(alone, key=_slowness, default=None),
            cheapest=min(fitting, key=_cost, default=None),
            fastest=min(fitting, key=_slowness, default=None),
            least_host=min((option for option in options if self._fits_gpu(option)), key=_cost, default=None),
            smallest=min(options, key=lambda option: (option.estimate.gpu_peak_bytes, *_cost(option))),
        )

    def least_fraction(self, choice: Choice) -> float:
        """Return the least fraction, in hundredths, at which a choice fits the GPU; 1.0 if none does."""
        missing_bytes = self._planner.estimate(choice).gpu_peak_bytes - self._budget.usable_gpu_bytes
        if missing_bytes <= 0:
            return choice.fraction
        hundredths = math.ceil(missing_bytes / max(1, self._state_bytes) / _STEP)
        while hundredths < 100:
            fraction = hundredths * _STEP
            found = self._planner.estimate(dataclasses.replace(choice, fraction=fraction))
            if found.gpu_peak_bytes <= self._budget.usable_gpu_bytes:
                return round(fraction, 2)
            hundredths += 1  # staging, or a gradient that is at its peak elsewhere, takes a little more
        return 1.0

    def _fits_gpu(self, option: Option) -> bool:
        return option.estimate.gpu_peak_bytes <= self._budget.usable_gpu_bytes

    def _option(self, choice: Choice) -> Option:
        estimate = self._planner.estimate(choice)
        return Option(choice, estimate, self._budget.fits(estimate))

    def _micro_batches(self) -> list[int]:
        per_copy = max(1, self._config.train.global_batch_size // self._num_data_parallel)
        return [size for size in range(1, per_copy + 1) if per_copy % size == 0]

    def _choices(self, micro_batches: list[int]) -> Iterator[Choice]:
        for micro_batch in micro_batches:
            for recompute, offload in self._policies:
                yield from self._fractions(Choice(micro_batch, recompute_layers=recompute, offload_layers=offload))

    def _fractions(self, without: Choice) -> Iterator[Choice]:
        """Yield a policy without optimizer offload, with the least that fits, and with all, at each placement."""
        yield without
        placements = ("auto", "streamed", "host") if self._engine == "native" else ("auto",)
        for placement in placements:
            choice = dataclasses.replace(without, placement=placement)
            if not self._accepts(dataclasses.replace(choice, fraction=1.0)):
                continue
            least = self.least_fraction(choice)
            for fraction in sorted({least, 1.0} - {0.0}):
                chosen = dataclasses.replace(choice, fraction=fraction)
                yield chosen
                if self._engine == "native":
                    for staging_gib in _STAGING_GIB:
                        yield dataclasses.replace(chosen, staging_gib=staging_gib)

    @functools.cached_property
    def _policies(self) -> list[tuple[int, int]]:
        """Pairs of layers recomputed and layers offloaded that the engine accepts: eighths, and all but one."""
        layers = self._num_stage_layers
        counts = sorted(({math.ceil(layers * eighths / 8) for eighths in range(1, 8)} | {layers - 1}) - {0, layers})
        pairs = [(0, 0), (self._num_layers, 0), *((count, 0) for count in counts), *((0, count) for count in counts)]
        return [
            (recompute, offload)
            for recompute, offload in pairs
            if self._accepts(Choice(1, recompute_layers=recompute, offload_layers=offload))
        ]

    def _accepts(self, choice: Choice) -> bool:
        return is_accepted(self._config, choice, self._engine, self._num_layers)


def _differs_by_offload_only(choice: Choice, configured: Choice) -> bool:
    """Return whether micro-batch and recomputation are as configured."""
    return (choice.micro_batch, choice.recompute_layers) == (configured.micro_batch, configured.recompute_layers)


def _cost(option: Option) -> tuple[float, float]:
    return option.estimate.host_total_bytes, option.estimate.step_seconds


def _slowness(option: Option) -> tuple[float, float]:
    # A hundredth of a step is nobody's to notice; less host memory is.
    return round(option.estimate.step_seconds, 4), option.estimate.host_total_bytes


def choice_of(config: Config, num_layers: int) -> Choice:
    """Return the choice that a configuration has made.

    Args:
        config: any.
        num_layers: of the model.
    """
    model, options = config.model, config.optimizer
    recompute = (model.recompute_num_layers or num_layers) if model.recompute_granularity == "full" else 0
    fraction = effective_fraction(options)
    return Choice(
        config.train.micro_batch_size,
        fraction,
        options.optimizer_offload_placement if fraction else "auto",
        options.optimizer_staging_gib if fraction else 0.0,
        recompute,
        model.cpu_offloading_num_layers if model.cpu_offloading and model.cpu_offloading_activations else 0,
    )


def words(config: Config, choice: Choice, num_layers: int) -> list[str]:
    """Return the overrides that turn ``config`` into a choice, only those that change something.

    Args:
        config: the starting point.
        choice: what was chosen.
        num_layers: of the model.
    """
    full = choice.recompute_layers > 0
    partial = full and choice.recompute_layers < num_layers
    offloads = choice.fraction > 0
    wanted: dict[str, object] = {
        "train.micro_batch_size": choice.micro_batch,
        "model.recompute_granularity": "full" if full else None,
        "model.recompute_num_layers": choice.recompute_layers if partial else None,
        "model.cpu_offloading": choice.offload_layers > 0,
        "model.cpu_offloading_num_layers": choice.offload_layers,
        "optimizer.optimizer_cpu_offload": offloads,
        "optimizer.optimizer_offload_fraction": choice.fraction,
        "optimizer.optimizer_offload_placement": choice.placement if offloads else "auto",
        "optimizer.optimizer_staging_gib": choice.staging_gib,
    }
    if offloads:
        wanted["optimizer.overlap_cpu_optimizer_d2h_h2d"] = True
    found = []
    for key, value in wanted.items():
        section, name = key.split(".")
        if getattr(getattr(config, section), name) != value:
            found.append(f"{key}={'null' if value is None else value}")
    return found


def apply(config: Config, choice: Choice, num_layers: int) -> Config:
    """Return a copy of ``config`` with a choice's overrides in it."""
    sections = {field.name: dataclasses.replace(getattr(config, field.name)) for field in dataclasses.fields(config)}
    changed = Config(**sections)
    for word in words(config, choice, num_layers):
        set_value(changed, *parse_word(word))
    return changed


def is_accepted(config: Config, choice: Choice, engine: Engine, num_layers: int) -> bool:
    """Return whether ``engine`` would run ``config`` with a choice, as far as the rules know."""
    # As on a command line, where a value that nothing reads is refused.
    sources = {word.partition("=")[0]: COMMAND_LINE for word in words(config, choice, num_layers)}
    known = {violation.rule for violation in violations(config, engine)}
    found = violations(apply(config, choice, num_layers), engine, sources=sources)
    return all(violation.rule in known for violation in found)
