"""SGD and Lion whose state may live on the host."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch.optim.optimizer import ParamsT

from forebay.engine import Engine
from forebay.optim.hyperparameters import check_hyperparameters
from forebay.optim.momentum_rule import MomentumRule
from forebay.optim.options import Options
from forebay.optim.placed_optimizer import PlacedOptimizer
from forebay.optim.update_rule import UpdateRule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PlacementOptions(TypedDict, total=False):
    """Where state lives and how it moves; :class:`forebay.AdamW` says what each means, and its default."""

    offload_fraction: float
    placement: str
    host_share: float | str | None
    overlap: bool
    staging_gib: float
    pinned: bool
    skip_nonfinite: bool
    early_updates: bool
    chunk_elements: int
    engine: Engine | None


class _MomentumOptimizer(PlacedOptimizer):
    def __init__(self, params: ParamsT, defaults: dict[str, Any], options: PlacementOptions) -> None:
        unknown = [name for name in options if name not in PlacementOptions.__annotations__]
        if unknown:
            choices = ", ".join([*defaults, *PlacementOptions.__annotations__])
            raise TypeError(f"unknown argument {unknown[0]!r}; choose from {choices}")
        engine = options.pop("engine", None)
        super().__init__(params, defaults, Options(**options), engine)  # type: ignore[misc]

    def _arguments(self) -> dict[str, Any]:
        return {**self.defaults, **dataclasses.asdict(self._options)}


class SGD(_MomentumOptimizer):
    """Stochastic gradient descent, as ``torch.optim.SGD``, with a share of its state on the host.

    Low-precision parameters get fp32 masters; a bf16 parameter has 6 bytes of state an element with momentum and 2
    without. Every placement gives the same bits, with the native host kernel.

    Args:
        params: parameters, named parameters or groups; bf16, fp16 or fp32, contiguous, all on one device.
        lr: learning rate. Default 1e-3.
        momentum: decay of the momentum buffer; 0 for none. Default 0.
        dampening: of the gradient that is added to the buffer. Default 0.
        weight_decay: added to the gradient. Default 0.
        nesterov: look ahead; needs momentum and no dampening. Default False.
        maximize: go up the gradient. Default False.
        options: see :class:`PlacementOptions`.

    Raises:
        ValueError: for a value out of range, or parameters that it cannot hold.
        TypeError: for an unknown option.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[PlacementOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, options)

    def _make_rule(self, device: torch.device) -> UpdateRule:
        has_moment = any(group["momentum"] for group in self.param_groups)
        return MomentumRule(is_lion=False, has_moment=has_moment, device=device)

    def _check_hyperparameters(self, group: dict[str, Any]) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            if not float(group[name]) >= 0.0:
                raise ValueError(f"{name} must be 0 or more, not {float(group[name])}.")
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise ValueError("nesterov=True needs momentum above 0 and dampening=0.")
        if self._placed is not None and group["momentum"] and not self.placed.rule.moments:
            raise ValueError(
                f"a group with momentum={group['momentum']} comes too late: the optimizer was built without momentum "
                "and has no room for it; give a group momentum when building the optimizer"
            )


class Lion(_MomentumOptimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023), a share of its state on the host.

    Low-precision parameters get fp32 masters; a bf16 parameter has 6 bytes of state an element. Every placement gives
    the same bits, with the native host kernel.

    Args:
        params: parameters, named parameters or groups; bf16, fp16 or fp32, contiguous, all on one device.
        lr: learning rate. Default 1e-4.
        betas: weight of the old moment in the update, and decay of the moment. Default (0.9, 0.99).
        weight_decay: decoupled. Default 0.
        maximize: go up the gradient. Default False.
        options: see :class:`PlacementOptions`.

    Raises:
        ValueError: for a value out of range, or parameters that it cannot hold.
        TypeError: for an unknown option.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[PlacementOptions],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, options)

    def _make_rule(self, device: torch.device) -> UpdateRule:
        return MomentumRule(is_lion=True, has_moment=True, device=device)

    def _check_hyperparameters(self, group: dict[str, Any]) -> None:
        check_hyperparameters(group["lr"], group["betas"], 0.0, group["weight_decay"])
