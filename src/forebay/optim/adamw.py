"""AdamW whose state may live on the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from forebay.engine import Engine
from forebay.optim.adamw_rule import AdamWRule
from forebay.optim.hyperparameters import check_hyperparameters
from forebay.optim.options import DEFAULT_CHUNK_ELEMENTS, Options, check_state_dtype
from forebay.optim.placed_optimizer import PlacedOptimizer
from forebay.optim.update_rule import UpdateRule


class AdamW(PlacedOptimizer):
    """AdamW (Loshchilov and Hutter, 2019) with a share of its state on the host.

    A drop-in for ``torch.optim.AdamW``. Low-precision parameters get fp32 master weights: a bf16 weight is the
    upper half of its master and a 16-bit remainder the lower, so the state of a bf16 parameter is 10 bytes an
    element. The update is the same bit for bit wherever it is made, with the native host kernel; with the torch
    fallback the host's is the same to within rounding.

    State is allocated by :meth:`allocate`, or at the first :meth:`step`.

    Args:
        params: parameters, named parameters or groups, as in ``torch.optim.AdamW``; bf16, fp16 or fp32,
            contiguous, all on one device.
        lr: learning rate. Default 1e-3.
        betas: decay rates of the two moments. Default (0.9, 0.999).
        eps: term added to the denominator. Default 1e-8.
        weight_decay: decoupled weight decay. Default 0.01.
        maximize: go up the gradient. Default False.
        offload_fraction: share of the state, in elements, that is held on the host; tensors are split to meet
            it exactly. Default 0.0.
        placement: how the offloaded share is held: ``"streamed"`` visits the device to be updated there;
            ``"host"`` is updated by the host kernel. Default ``"auto"``: both, divided so that they take about
            equally long at an H200's rates (on a CPU, where nothing is gained by it, all streamed).
        host_share: fix the share of the offloaded part that the host updates, 0 to 1, instead of ``placement``;
            ``"calibrated"`` divides as ``"auto"`` does at this machine's own rates, which are measured once a
            process and device, in about a second (:mod:`forebay.optim.cost_model`). Default None.
        overlap: let transfers run under other work. Default True.
        staging_gib: device memory, in GiB, that visiting state may add to the highest peak of a step; below
            that peak it uses what is free anyway. Default 0.0.
        pinned: pin the host memory that is copied. Default True.
        skip_nonfinite: leave everything untouched in a step whose gradient norm is not finite. Default False.
        state_dtype: of the moments. ``"bf16"`` (6 bytes of state a bf16 parameter, master included) and ``"8bit"``
            (4.1 bytes; no host kernel, so all that is offloaded is streamed) lose precision: they are stored with
            stochastic rounding, see :mod:`forebay.optim.low_precision`. Default ``"fp32"``, exact (10 bytes).
        chunk_elements: most elements that travel in one piece. Default about 16 Mi.
        early_updates: start host updates during backward, before the gradient's norm is known, and settle them at
            the step; takes up to 1 byte of host memory an offloaded element, see
            :mod:`forebay.optim.early_updates`. Results are the same. Default False: a gain has not been
            measured.
        engine: what moves the state. Default: this process's engine for the parameters' device.

    Raises:
        ValueError: for a value out of range, or parameters that it cannot hold; the message says which.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
        offload_fraction: float = 0.0,
        placement: str = "auto",
        host_share: float | str | None = None,
        overlap: bool = True,
        staging_gib: float = 0.0,
        pinned: bool = True,
        skip_nonfinite: bool = False,
        state_dtype: str = "fp32",
        chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
        early_updates: bool = False,
        engine: Engine | None = None,
    ) -> None:
        check_state_dtype(state_dtype)
        self._state_dtype = state_dtype
        options = Options(
            offload_fraction=offload_fraction,
            placement=placement,
            host_share=host_share,
            overlap=overlap,
            staging_gib=staging_gib,
            pinned=pinned,
            skip_nonfinite=skip_nonfinite,
            chunk_elements=chunk_elements,
            early_updates=early_updates,
        )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, options, engine)

    def _make_rule(self, device: torch.device) -> UpdateRule:
        return AdamWRule(device, self._state_dtype)

    def _check_hyperparameters(self, group: dict[str, Any]) -> None:
        check_hyperparameters(group["lr"], group["betas"], group["eps"], group["weight_decay"])

    def _arguments(self) -> dict[str, Any]:
        return {**self.defaults, **dataclasses.asdict(self._options), "state_dtype": self._state_dtype}
