"""AdamW and Adam for parameters on the CPU, with forebay's host kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from forebay.host.kernels import Algorithm, Hyper, Segment, UpdateTask
from forebay.optim.dense import flat, is_dense
from forebay.optim.hyperparameters import check_hyperparameters

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STATE_KEYS = ("exp_avg", "exp_avg_sq")


def _like(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return ``source``, copied if its layout in memory is not that of ``tensor``, which is dense."""
    if source.stride() == tensor.stride():
        return source
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=source.dtype).copy_(source)


class HostAdamW(Optimizer):
    """``torch.optim.AdamW`` (Loshchilov & Hutter, arXiv 1711.05101) for CPU parameters, in one pass over memory.

    Same arguments, results (to a few units in the last place of float32) and state as torch's: ``state_dict()`` loads
    into ``torch.optim.AdamW`` and back. bfloat16 and float16 parameters are updated in float32 arithmetic and rounded
    to nearest even; their state is float32, where torch would keep the parameter's dtype.

    Args:
        params: parameters or parameter groups, float32, bfloat16 or float16 on the CPU.
        lr: learning rate, a number or a tensor with one element.
        betas: decay of ``exp_avg`` and ``exp_avg_sq``.
        eps: added to the denominator.
        weight_decay: weight decay.
        amsgrad: must be False; it is there so that state dicts interchange.
        maximize: ascend instead of descend.
        decoupled_weight_decay: False adds the weight decay to the gradient, like ``torch.optim.Adam``.

    Raises:
        ValueError: a hyperparameter is out of range, ``amsgrad`` is asked for, or a parameter has an unfit device,
            dtype or layout.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = True,
    ) -> None:
        check_hyperparameters(lr, betas, eps, weight_decay)
        # The keys that have no meaning here are torch's, whose AdamW reads them from a group it has loaded.
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in ``torch.optim.Optimizer``, after checking its parameters and values."""
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        check_hyperparameters(group["lr"], group["betas"], group["eps"], group["weight_decay"])
        if group["amsgrad"]:
            raise ValueError("HostAdamW does not support amsgrad=True; use torch.optim.AdamW for it.")
        for param in group["params"]:
            if param.device.type != "cpu":
                raise ValueError(
                    f"HostAdamW updates parameters on the CPU, but one is on {param.device}; use torch.optim.AdamW, or "
                    "forebay.AdamW to offload its state."
                )
            if param.dtype not in _DTYPES or param.layout != torch.strided:
                raise ValueError(
                    f"HostAdamW updates dense float32, bfloat16 and float16 parameters, but one is {param.dtype}, "
                    f"{param.layout}; use torch.optim.AdamW."
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a HostAdamW, ``torch.optim.AdamW`` or ``torch.optim.Adam``."""
        if any(group.get("amsgrad") for group in state_dict["param_groups"]):
            raise ValueError(
                "the state dict has amsgrad=True, which HostAdamW does not support; use torch.optim.AdamW."
            )
        loaded: list[dict[str, Any]] = []
        # Runs after the user's own hooks, which may return another dict.
        handle = self.register_load_state_dict_pre_hook(lambda _, final: loaded.append(final))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        # torch has cast the state to each parameter's dtype, which would round ours.
        ids = [i for group in loaded[0]["param_groups"] for i in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for i, param in zip(ids, params, strict=True):
            for key in _STATE_KEYS if param in self.state else ():
                source = loaded[0]["state"][i][key]
                self.state[param][key] = self._empty_state(param).copy_(source)

    @staticmethod
    def _empty_state(param: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(param, dtype=torch.float32, memory_format=torch.preserve_format)

    def _state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state = cast(dict[str, torch.Tensor], self.state[param])
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for key in _STATE_KEYS:
                state[key] = self._empty_state(param).zero_()
        step = state["step"]
        if not isinstance(step, torch.Tensor) or step.dtype != torch.float32 or step.device.type != "cpu":
            state["step"] = torch.tensor(float(step), dtype=torch.float32)  # from an old checkpoint
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss again, with gradients enabled, and returns it.

        Returns:
            What the closure returned.

        Raises:
            ValueError: a gradient is sparse, or not on the CPU.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            self._check_group(group)  # its values may have been changed, by a scheduler or by loading
            self._step_group(index, group)
        return loss

    def _step_group(self, index: int, group: dict[str, Any]) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        for param in params:
            if param.grad.layout != torch.strided:
                raise ValueError("HostAdamW does not support sparse gradients; use torch.optim.SparseAdam.")
        hyper = Hyper(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            maximize=bool(group["maximize"]),
        )
        updates = [(param, param.detach() if is_dense(param) else param.detach().contiguous()) for param in params]
        segments = []
        for param, weight in updates:
            state = self._state_of(param)
            for key in _STATE_KEYS:
                state[key] = _like(weight, state[key])
            segments.append(
                Segment(
                    grad=flat(_like(weight, param.grad)),
                    param=flat(weight),
                    exp_avg=flat(state["exp_avg"]),
                    exp_avg_sq=flat(state["exp_avg_sq"]),
                    step=state["step"],
                )
            )
        algorithm = Algorithm.ADAMW if group["decoupled_weight_decay"] else Algorithm.ADAM
        task = UpdateTask(f"HostAdamW group {index}", algorithm, segments, hyper)
        task.run()
        task.raise_for_status()
        for param, weight in updates:
            if weight.data_ptr() != param.data_ptr():
                param.copy_(weight)
            else:
                # The kernel wrote where autograd cannot see it: a backward that saved the old value must fail.
                torch.autograd.graph.increment_version(param)
