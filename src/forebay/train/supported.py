"""Settings that this trainer cannot honour yet are refused by name, not passed over."""

from __future__ import annotations

import os

from forebay.config.schema import Config

_PARALLEL_SIZES = (
    "pipeline_model_parallel_size",
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


def check_supported(config: Config) -> None:
    """Check that everything the configuration asks for is there.

    Raises:
        ValueError: naming the setting, what is supported, and the value to set.
    """
    model = config.model
    for name in ("cpu_offloading", "fine_grained_activation_offloading"):
        if getattr(model, name):
            raise ValueError(
                f"model.{name}=True: forebay train does not offload activations or weights yet; set it to False "
                "and lower memory with optimizer.optimizer_cpu_offload or model.recompute_granularity=full"
            )
    if model.cuda_graph_impl != "none":
        raise ValueError(
            f"model.cuda_graph_impl={model.cuda_graph_impl}: forebay train captures no CUDA graphs yet; set it to none"
        )
    if model.recompute_granularity not in (None, "full"):
        raise ValueError(
            f"model.recompute_granularity={model.recompute_granularity}: forebay train recomputes whole layers "
            "only; set it to full or null"
        )
    if model.recompute_granularity == "full" and model.recompute_num_layers not in (None, model.num_layers):
        raise ValueError(
            f"model.recompute_num_layers={model.recompute_num_layers}: forebay train recomputes all layers or "
            f"none; set it to null or {model.num_layers}"
        )
    for name in _PARALLEL_SIZES:
        if getattr(model, name) != 1:
            raise ValueError(f"model.{name}={getattr(model, name)}: forebay train runs on one device; set it to 1")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != 1:
        raise ValueError(
            f"started as one of {world_size} processes (WORLD_SIZE), but forebay train runs on one device and "
            "every process would train the same; start it without torchrun"
        )
