"""A run that trains in milliseconds, as words for a recipe; what tests of the trainer and of reports share."""

from __future__ import annotations

TINY = [
    "model.vocab_size=256",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.ffn_hidden_size=64",
    "train.device=cpu",
    "train.train_iters=6",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "train.eval_interval=null",
    "dataset.seq_length=16",
    "dataset.eval_fraction=0.0",
    "logger.tensorboard=False",
    "logger.log_interval=1",
    "optimizer.optimizer_cpu_offload=False",
    "optimizer.optimizer_offload_fraction=0.0",
    "optimizer.lr=1e-2",
    "optimizer.min_lr=1e-3",
    "optimizer.lr_warmup_iters=2",
]

TEXT = "".join(f"{number} bottles of beer on the wall, take {number % 7} down\n" for number in range(60))


def words(folder, *overrides: str) -> list[str]:
    """Return the words of a tiny run on a text in ``folder``, which is written there, changed by ``overrides``."""
    file = folder / "text.txt"
    file.write_text(TEXT)
    return [*TINY, f"dataset.path={file}", f"logger.output_dir={folder / 'run'}", *overrides]
