"""The step loop."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch

from forebay.config import Resolved, dump, validate
from forebay.config.schema import Config
from forebay.engine import get_engine
from forebay.host.ledger import Tier
from forebay.train import checkpoint
from forebay.train.interrupts import Interrupts
from forebay.train.memory_file import MemoryFile
from forebay.train.metrics import DeferredScalars, MemoryMeter, MetricsLog, StepMetrics
from forebay.train.model import (
    build_on_device,
    enable_full_recompute,
    language_model_loss,
    parameter_bytes,
)
from forebay.train.optimizers import build_optimizer
from forebay.train.prepare import data_seed, num_micro_batches, prepare, schedule_settings
from forebay.train.progress import Progress
from forebay.train.report import History, banner, summarize
from forebay.train.schedule import build_scheduler
from forebay.train.state import load_optimizer, make_deterministic, rng_state, seed_everything, set_rng_state

MAX_NONFINITE_STEPS = 3


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient norm was not a number for several steps in a row."""


class Trainer:
    """Trains one model on one device.

    The constructor checks everything, then allocates; :meth:`run` trains.

    Args:
        config: the resolved configuration.
        config_yaml: the same as text, kept in every checkpoint.
        stream: where to print. Default: standard output.

    Raises:
        ValueError: for anything in the configuration that cannot be honoured; see :mod:`forebay.train.prepare`.
        FileNotFoundError: for a file or folder that does not exist.
    """

    def __init__(self, config: Config, *, config_yaml: str = "", stream: TextIO | None = None) -> None:
        self.config = config
        self._config_yaml = config_yaml
        if config.train.deterministic:
            make_deterministic()
        self.prepared = prepared = prepare(config)
        self.step = 0
        self.position = 0  # sequences consumed since the start of training
        self.num_micro_batches = num_micro_batches(config)
        self._folder = Path(config.logger.output_dir).expanduser()
        if config.checkpoint.save is not None:
            self._checkpoints: Path | None = Path(config.checkpoint.save).expanduser()
        else:
            self._checkpoints = None

        self.engine = get_engine(prepared.device, config.train.engine)
        self.model = build_on_device(
            prepared.hf_config,
            prepared.dtype,
            prepared.device,
            seed=config.train.seed if config.model.seed is None else config.model.seed,
            folder=config.model.path if prepared.resume_from is None else None,
            attention=config.model.attn_implementation,
        )
        # Behind the weights, so that dropout does not depend on how many random numbers they took.
        seed_everything(config.train.seed)
        if config.model.recompute_granularity == "full":
            enable_full_recompute(self.model)
        if prepared.resume_from is not None:
            # Before the optimizer exists: its masters start from the weights.
            checkpoint.load_model(prepared.resume_from, self.model)
        self._params = [p for p in self.model.parameters() if p.requires_grad]
        self._unaccount = self._account()
        self.optimizer: Any = build_optimizer(config, self.model, self.engine)
        self.scheduler = build_scheduler(self.optimizer, **schedule_settings(config))
        notes = [] if prepared.resume_from is None else self._resume(prepared.resume_from)
        self.first_step = self.step + 1

        self.progress = Progress(
            config.train.train_iters,
            log_interval=config.logger.log_interval,
            mode=config.logger.progress,
            log_file=self._folder / "train.log",
            stream=stream,
        )
        self.progress.note(*banner(config, prepared, self.engine), *notes)
        self._log = MetricsLog(self._folder, first_step=self.first_step, tensorboard=bool(config.logger.tensorboard))
        self._meter = MemoryMeter(self.engine)
        self._memory_file = MemoryFile(self._folder, self.engine, config.train.train_iters)
        self._memory_file.update(self.step)
        self._scalars = DeferredScalars(self.engine)
        self._rates: dict[int, float] = {}
        self._clock = time.perf_counter()
        self._history = History()
        self._num_nonfinite = 0
        self._evaluated_step = self._saved_step = self.step

    def run(self) -> int:
        """Train to the last step.

        Returns:
            0, or 128 plus the signal's number when SIGINT or SIGTERM ended it early.

        Raises:
            NonFiniteLossError: after several steps in a row without a finite loss and gradient norm.
            forebay.train.checkpoint.CheckpointError: when a checkpoint cannot be written.
        """
        with Interrupts() as interrupts:
            self._clock = time.perf_counter()
            while self.step < self.config.train.train_iters and interrupts.received is None:
                self.train_step()
                # The step before this one is read while the device still works on this one.
                self._collect(keep=1)
                if self._is_due(self.config.train.eval_interval):
                    self._evaluate_and_log()
                if self._is_due(self.config.checkpoint.save_interval):
                    self._save_if_finite()
            self._collect(keep=0)
            received = interrupts.received
            if received is None:
                self._evaluate_and_log()
            # Still guarded: a Ctrl-C in here must not break the checkpoint.
            self._save_if_finite()
        summary = summarize(
            self.config,
            self.prepared,
            self._history,
            first_step=self.first_step,
            last_step=self.step,
            interrupted=received is not None,
        )
        summary.write(self._folder / "summary.json")
        if received is not None:
            self.progress.note(f"stopped by {received.name} behind step {self.step}")
        self.progress.note(*summary.lines())
        return 0 if received is None else 128 + int(received)

    def close(self) -> None:
        """Close the log files and take this run out of the engine's ledger. May be called twice."""
        self._memory_file.end(self.step)
        self._unaccount()
        self._log.close()
        self.progress.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def train_step(self) -> None:
        """Do one optimizer step on the next global batch, without waiting for the device."""
        micro_size = self.config.train.micro_batch_size
        num_tokens = self.config.train.global_batch_size * self.config.dataset.seq_length
        loss = torch.zeros((), device=self.engine.device)
        for _ in range(self.num_micro_batches):
            sequences = self._to_device(self.prepared.train_sequences.batch(self.position, micro_size))
            part, report = language_model_loss(
                self.model,
                sequences,
                num_global_tokens=num_tokens,
                num_micro_batches=self.num_micro_batches,
            )
            part.backward()
            loss += report
            self.position += micro_size
        grad_norm = self._clip()
        self.step += 1
        self._rates[self.step] = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._scalars.push(self.step, loss, grad_norm)
        self._memory_file.update(self.step)

    def finished_steps(self, *, keep: int = 0) -> list[tuple[int, float, float, float]]:
        """Wait for queued steps; for those who call :meth:`train_step` themselves, :meth:`run` logs them.

        Args:
            keep: of how many steps, the last ones, not to wait for. Default 0.

        Returns:
            For each step that has not been returned yet: its number, loss, gradient norm, and when it had finished, in
            seconds of ``time.perf_counter()``.
        """
        return [self._scalars.pop() for _ in range(len(self._scalars) - keep)]

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the first ``train.eval_iters`` micro-batches of the evaluation text."""
        sequences = self.prepared.eval_sequences
        assert sequences is not None
        micro_size = min(self.config.train.micro_batch_size, sequences.num_blocks)
        num_batches = max(1, min(self.config.train.eval_iters, sequences.num_blocks // micro_size))
        num_tokens = num_batches * micro_size * self.config.dataset.seq_length
        total = torch.zeros((), device=self.engine.device)
        self.model.eval()
        for index in range(num_batches):
            batch = self._to_device(sequences.batch(index * micro_size, micro_size))
            total += language_model_loss(self.model, batch, num_global_tokens=num_tokens)[1]
        self.model.train()
        return float(total)

    def save(self) -> Path:
        """Write a checkpoint of the run as it is now and return its folder."""
        assert self._checkpoints is not None
        if hasattr(self.optimizer, "synchronize"):
            # The weights are read below, outside of a forward that would wait for their updates.
            self.optimizer.synchronize()
        state = {
            "step": self.step,
            "data": {
                "position": self.position,
                "corpus": self.prepared.corpus.fingerprint,
                "order": self._order(),
            },
            "optimizer": self.optimizer.state_dict(),
            "scheduler": {
                "last_epoch": self.scheduler.last_epoch,
                "_step_count": self.scheduler._step_count,
            },
            "rng": rng_state(self.engine.device),
        }
        return checkpoint.save_checkpoint(
            self._checkpoints,
            step=self.step,
            model=self.model,
            state=state,
            config_yaml=self._config_yaml,
            keep=self.config.checkpoint.keep,
        )

    # Inside

    def _account(self) -> Callable[[], object]:
        # Weights and gradients are torch's own allocations; the ledger is where everything is looked up.
        ledger = self.engine.ledger
        sizes = {
            "weights": parameter_bytes(self.model),
            "gradients": sum(p.numel() * p.element_size() for p in self._params),
        }

        def remove() -> None:
            for purpose, num_bytes in sizes.items():
                ledger.remove(Tier.DEVICE, purpose, num_bytes)

        for purpose, num_bytes in sizes.items():
            ledger.add(Tier.DEVICE, purpose, num_bytes)
        # Also when the trainer is dropped without close(): the engine outlives it.
        return weakref.finalize(self, remove)

    def _order(self) -> list[int]:
        return [data_seed(self.config), self.config.dataset.seq_length, self.prepared.train_sequences.num_blocks]

    def _resume(self, folder: Path) -> list[str]:
        on_cuda = self.engine.device.type == "cuda"
        state = checkpoint.load_state(folder, memory_mapped=on_cuda)
        load_optimizer(self.optimizer, self.scheduler, state["optimizer"], state["scheduler"])
        set_rng_state(state["rng"], self.engine.device)
        self.step = int(state["step"])
        data = state["data"]
        if data["corpus"] == self.prepared.corpus.fingerprint and data["order"] == self._order():
            self.position = int(data["position"])
            return [f"continues behind step {self.step}, sequence {self.position:,}"]
        return [
            f"continues behind step {self.step}; the text, its split, the seed or dataset.seq_length differs "
            "from the checkpoint's, so the text is read from its start"
        ]

    def _to_device(self, rows: Any) -> torch.Tensor:
        batch = torch.from_numpy(rows)
        if self.engine.device.type == "cuda":
            # From pageable memory the copy would wait for everything queued before it.
            return batch.pin_memory().to(self.engine.device, non_blocking=True)
        return batch

    def _clip(self) -> torch.Tensor:
        max_norm = self.config.optimizer.clip_grad
        if max_norm > 0:
            if hasattr(self.optimizer, "clip_grad_norm_"):
                norm: torch.Tensor = self.optimizer.clip_grad_norm_(max_norm)
                return norm
            return torch.nn.utils.clip_grad_norm_(self._params, max_norm)
        return torch.nn.utils.get_total_norm([p.grad for p in self._params if p.grad is not None])

    def _is_due(self, interval: int | None) -> bool:
        return bool(interval) and self.step % int(interval or 1) == 0

    def _collect(self, *, keep: int) -> None:
        while len(self._scalars) > keep:
            step, loss, grad_norm, finished = self._scalars.pop()
            # The clock's resolution keeps a step of almost no work above zero.
            seconds = max(finished - self._clock, 1e-6)
            self._clock = max(finished, self._clock)
            num_tokens = self.config.train.global_batch_size * self.config.dataset.seq_length
            stats: dict[str, Any] = self.optimizer.stats() if hasattr(self.optimizer, "stats") else {}
            metrics = StepMetrics(
                step=step,
                loss=loss,
                grad_norm=grad_norm,
                lr=self._rates.pop(step),
                tokens_per_s=num_tokens / seconds,
                step_ms=1000 * seconds,
                **self._meter.read(),
                down_gbps=stats.get("down_gbps"),
                up_gbps=stats.get("up_gbps"),
                host_update_ms=stats.get("host_update_ms"),
                stall_ms=stats.get("stall_ms"),
            )
            self._history.add(metrics)
            self._log.write(metrics)
            self.progress.step(metrics)
            self._check_finite(metrics)

    def _check_finite(self, metrics: StepMetrics) -> None:
        self._num_nonfinite = 0 if metrics.is_finite else self._num_nonfinite + 1
        if self._num_nonfinite >= MAX_NONFINITE_STEPS:
            raise NonFiniteLossError(
                f"loss {metrics.loss} and gradient norm {metrics.grad_norm} at step {metrics.step}, not finite for "
                f"{self._num_nonfinite} steps in a row; no checkpoint was written since. Lower optimizer.lr, "
                "lengthen the warm-up, or go back to an earlier checkpoint"
            )

    def _evaluate_and_log(self) -> None:
        self._collect(keep=0)
        if self.prepared.eval_sequences is None or self._evaluated_step == self.step or self._num_nonfinite:
            return
        self._evaluated_step = self.step
        self._history.eval_loss = self.evaluate()
        self._log.write_eval(self.step, self._history.eval_loss)
        self.progress.note(f"step {self.step} | evaluation loss {self._history.eval_loss:.4f}")
        self._clock = time.perf_counter()

    def _save_if_finite(self) -> None:
        if self._checkpoints is None or self._saved_step == self.step:
            return
        self._collect(keep=0)
        if self._num_nonfinite:
            self.progress.note(f"step {self.step} | no checkpoint: the last loss is not finite")
            return
        self.progress.note(f"step {self.step} | saved {self.save()}")
        self._saved_step = self.step
        self._clock = time.perf_counter()


def train(resolved: Resolved) -> int:
    """Train what a resolved recipe describes and return the exit code: 0, or 130 after Ctrl-C."""
    # Once more in the constructor, which does not know which values the user set.
    validate(resolved.config, sources=resolved.sources)
    with Trainer(resolved.config, config_yaml=dump(resolved)) as trainer:
        return trainer.run()


__all__ = ["NonFiniteLossError", "Trainer", "train"]
