"""What Adam, AdamW and Lion accept."""

from __future__ import annotations

from typing import Any

import torch


def check_hyperparameters(lr: float | torch.Tensor, betas: Any, eps: float, weight_decay: float) -> None:
    """Raise ValueError, saying which and what is valid, if a hyperparameter is out of range."""
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"lr has {lr.numel()} elements; a tensor lr must have one.")
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not float(value) >= 0.0:
            raise ValueError(f"{name} must be 0 or more, not {float(value)}.")
    if len(betas) != 2 or not all(0.0 <= float(beta) < 1.0 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), not {tuple(betas)}.")
