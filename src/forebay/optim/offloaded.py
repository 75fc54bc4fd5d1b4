"""Any torch optimizer with elementwise state, a share of that state on the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from forebay.engine import Engine
from forebay.optim import elementwise
from forebay.optim.options import DEFAULT_CHUNK_ELEMENTS, Options
from forebay.optim.placed_optimizer import PlacedOptimizer
from forebay.optim.torch_rule import TorchRule
from forebay.optim.update_rule import UpdateRule


class OffloadedOptimizer(PlacedOptimizer):
    """An optimizer of any class, with a share of its state on the host.

    The class's own code makes the updates, on the device, from fp32 masters; state visits for them chunk by chunk.
    So it must be elementwise: what becomes of an element may depend on that element's gradients only, not on norms or
    shapes. The constructor tries the class on a few elements, whole and in pieces, and refuses it otherwise.
    For AdamW, :class:`forebay.AdamW` is faster.

    Args:
        params: parameters, named parameters or groups; bf16, fp16 or fp32, contiguous, all on one device.
        optimizer_class: a subclass of ``torch.optim.Optimizer``.
        offload_fraction: share of the state, in elements, that is held on the host. Default 0.0.
        overlap: let transfers run under other work. Default True.
        staging_gib: device memory, in GiB, that visiting state may add to the highest peak of a step. Default 0.0.
        pinned: pin the host memory that is copied. Default True.
        skip_nonfinite: leave everything untouched in a step whose gradient norm is not finite; this waits for the
            device once a step, since the class counts its steps in Python. Default False.
        chunk_elements: most elements that travel in one piece; an update needs 8 bytes of device memory for each.
            Default about 16 Mi.
        engine: what moves the state. Default: this process's engine for the parameters' device.
        hyperparameters: keyword arguments of ``optimizer_class``.

    Raises:
        ValueError: for a class that is not elementwise, a value out of range, or parameters that it cannot hold.
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        offload_fraction: float = 0.0,
        overlap: bool = True,
        staging_gib: float = 0.0,
        pinned: bool = True,
        skip_nonfinite: bool = False,
        chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
        engine: Engine | None = None,
        **hyperparameters: Any,
    ) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
            raise ValueError(
                f"optimizer_class must be a subclass of torch.optim.Optimizer, such as torch.optim.Adagrad, got "
                f"{optimizer_class!r}"
            )
        self._class = optimizer_class
        self._hyperparameters = hyperparameters
        self._schemas: list[elementwise.StateSchema] = []
        options = Options(
            offload_fraction=offload_fraction,
            placement="streamed",
            overlap=overlap,
            staging_gib=staging_gib,
            pinned=pinned,
            skip_nonfinite=skip_nonfinite,
            chunk_elements=chunk_elements,
        )
        super().__init__(params, {}, options, engine)
        self.defaults = dict(self._schemas[0].defaults)

    def _make_rule(self, device: torch.device) -> UpdateRule:
        rule = TorchRule(self._class, self._hyperparameters, device)
        for schema in self._schemas:
            rule.add_schema(schema)
        return rule

    def _check_hyperparameters(self, group: dict[str, Any]) -> None:
        own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        schema = elementwise.inspect(self._class, self._hyperparameters, own, group["params"][0].device)
        if self._placed is not None:
            assert isinstance(self.placed.rule, TorchRule)
            self.placed.rule.add_schema(schema)
        self._schemas.append(schema)
        for key, value in schema.defaults.items():
            group.setdefault(key, value)

    def _arguments(self) -> dict[str, Any]:
        options = dataclasses.asdict(self._options)
        for name in ("placement", "host_share", "early_updates"):
            del options[name]  # nothing is updated on the host
        return {"optimizer_class": self._class, **options, **self._hyperparameters}
