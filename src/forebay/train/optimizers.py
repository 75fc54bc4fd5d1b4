"""The optimizer of a run, from its configuration, and what it will hold on each tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forebay.config.schema import Config, OptimizerConfig
from forebay.engine import Engine

SGD_MOMENTUM = 0.9  # Megatron's default


def effective_fraction(config: OptimizerConfig) -> float:
    """Return the share of the optimizer state on the host: 0 unless ``optimizer_cpu_offload`` is on.

    Raises:
        ValueError: for ``auto``, which :func:`forebay.plan.auto.choose_fraction` turns into a number.
    """
    if not config.optimizer_cpu_offload:
        return 0.0
    if isinstance(config.optimizer_offload_fraction, str):
        raise ValueError(
            f"optimizer.optimizer_offload_fraction={config.optimizer_offload_fraction} has not been turned into a "
            "number; `forebay train` does that, in Python call forebay.plan.auto.choose_fraction first"
        )
    return config.optimizer_offload_fraction


def uses_torch_classes(config: OptimizerConfig) -> bool:
    """Return whether ``torch.optim`` does the updates, in the drop-in class, rather than ``forebay.AdamW``."""
    if config.optimizer != "adamw":
        return True
    return config.optimizer_cpu_offload and config.use_torch_optimizer_for_cpu_offload


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups of named parameters: matrices are decayed, vectors (norms and biases) are not."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ValueError("no parameter of the model requires a gradient, so there is nothing to train")
    groups = [
        {"params": [(name, p) for name, p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(config: Config, model: torch.nn.Module, engine: Engine) -> torch.optim.Optimizer:
    """Return the optimizer for ``model``, attached to it, with its state allocated where it can be.

    Raises:
        ValueError: for settings that the optimizer cannot honour.
        HostMemoryError: when the host share does not fit.
    """
    options = config.optimizer
    groups = parameter_groups(model, options.weight_decay)
    if uses_torch_classes(options):
        from forebay.optim.hybrid import HybridDeviceOptimizer

        optimizer_class, arguments = _torch_class(options)
        return HybridDeviceOptimizer(
            groups,
            offload_fraction=effective_fraction(options),
            cpu_optimizer_cls=optimizer_class,
            gpu_optimizer_cls=optimizer_class,
            param_update_in_fp32=True,
            pin_cpu_grads=options.pin_cpu_grads,
            pin_cpu_params=options.pin_cpu_params,
            overlap_cpu_optimizer_d2h_h2d=options.overlap_cpu_optimizer_d2h_h2d,
            engine=engine,
            **arguments,
        )
    from forebay.optim.adamw import AdamW

    optimizer = AdamW(
        groups,
        lr=options.lr,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
        staging_gib=options.optimizer_staging_gib,
        engine=engine,
        **_adamw_options(options),
    )
    if effective_fraction(options) > 0 or options.optimizer_state_dtype != "fp32":
        # Before allocating: the order in which the modules come decides what lives where. Stochastic rounding draws by
        # the number a parameter has in this order, so it must be the same one without offloading.
        optimizer.attach(model)
    optimizer.allocate()
    return optimizer


def _torch_class(options: OptimizerConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    if options.optimizer == "sgd":
        return torch.optim.SGD, {"lr": options.lr, "momentum": SGD_MOMENTUM}
    chosen: type[torch.optim.Optimizer] = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
    betas = (options.adam_beta1, options.adam_beta2)
    return chosen, {"lr": options.lr, "betas": betas, "eps": options.adam_eps}


def optimizer_plan(
    config: Config, params: Sequence[torch.Tensor], device: torch.device, *, fraction: float | None = None
) -> dict[str, dict[str, int]]:
    """Return the bytes the optimizer will hold, per tier and purpose, without allocating.

    Args:
        config: of the run.
        params: the trained parameters in the model's order, on any device, meta included.
        device: that will train.
        fraction: plan for this share on the host. Default None: the configured one.
    """
    options = config.optimizer
    if fraction is None:
        fraction = effective_fraction(options)
    if uses_torch_classes(options):
        return _hybrid_plan(options, params, fraction)
    from forebay.optim.options import plan_memory

    return plan_memory(params, device=device, **{**_adamw_options(options), "offload_fraction": fraction})


def _adamw_options(options: OptimizerConfig) -> dict[str, Any]:
    assert options.pin_cpu_grads == options.pin_cpu_params, "a rule of forebay.config refuses this"
    return {
        "offload_fraction": effective_fraction(options),
        "placement": options.optimizer_offload_placement,
        "overlap": options.overlap_cpu_optimizer_d2h_h2d,
        "pinned": options.pin_cpu_params,
        "state_dtype": options.optimizer_state_dtype,
        "early_updates": options.optimizer_early_updates,
    }


def _hybrid_plan(
    options: OptimizerConfig, params: Sequence[torch.Tensor], fraction: float
) -> dict[str, dict[str, int]]:
    from forebay.optim.options import add_bytes

    plan: dict[str, dict[str, int]] = {"device": {}, "pinned": {}, "pageable": {}}

    target = fraction * sum(p.numel() for p in params)
    offloaded = 0
    for param in params:
        # The moments are fp32, and every parameter that is not fp32 itself has an fp32 copy.
        copy_bytes = 0 if param.dtype == torch.float32 else 4
        state_bytes = param.numel() * ((4 if options.optimizer == "sgd" else 8) + copy_bytes)
        if offloaded < target:
            offloaded += param.numel()
            own_bytes = param.numel() * param.element_size()
            add_bytes(plan, "pageable", "optimizer_state", state_bytes)
            add_bytes(plan, "pinned" if options.pin_cpu_params else "pageable", "weights", own_bytes)
            add_bytes(plan, "pinned" if options.pin_cpu_grads else "pageable", "gradients", own_bytes)
        else:
            add_bytes(plan, "device", "optimizer_state", state_bytes)
    return plan
