"""What Megatron Core and Megatron Bridge refuse, with the message that their users see in a log."""

from __future__ import annotations

from forebay.config.rule import MEGATRON, Rule, layers_out_of_range

MEGATRON_RULES = (
    Rule(
        "activation_offload_pp",
        "activation offload and pipeline parallelism",
        lambda config: config.model.cpu_offloading and config.model.pipeline_model_parallel_size > 1,
        "Currently there is no support for Pipeline parallelism with CPU offloading",
        "model.pipeline_model_parallel_size=1, or optimizer.optimizer_cpu_offload=True and model.cpu_offloading=False",
        MEGATRON,
    ),
    Rule(
        "activation_offload_recompute",
        "activation offload and `model.recompute_granularity`",
        lambda config: config.model.cpu_offloading and config.model.recompute_granularity is not None,
        "CPU offloading does not work when activation recomputation is enabled",
        "model.recompute_granularity=null",
        MEGATRON,
    ),
    Rule(
        "both_activation_offloads",
        "both kinds of activation offload",
        lambda config: config.model.cpu_offloading and config.model.fine_grained_activation_offloading,
        "fine_grained_activation_offloading cannot be enabled with cpu_offloading",
        "model.fine_grained_activation_offloading=False, or model.cpu_offloading=False",
        MEGATRON,
    ),
    Rule(
        "activation_offload_cuda_graphs",
        "activation offload and CUDA graphs",
        lambda config: config.model.cpu_offloading and config.model.cuda_graph_impl != "none",
        "CUDA graphs not supported with CPU offloading",
        "model.cuda_graph_impl=none; newer versions of Megatron Core allow graphs of the full iteration",
        MEGATRON,
    ),
    Rule(
        "activation_offload_layers",
        "activation offload and `model.cpu_offloading_num_layers` < 0 or >= number of layers",
        lambda config: config.model.cpu_offloading and layers_out_of_range(config),
        "CPU offloading can be done only for layers less than {num_layers}",
        "model.cpu_offloading_num_layers from 0 to num_layers - 1",
        MEGATRON,
    ),
    Rule(
        "optimizer_offload_distributed",
        "optimizer offload without `optimizer.use_distributed_optimizer`",
        lambda config: config.optimizer.optimizer_cpu_offload and not config.optimizer.use_distributed_optimizer,
        "CPU offloading only supported with decoupled_weight_decay enabled (AdamW mode)",
        "optimizer.use_distributed_optimizer=True",
        MEGATRON,
    ),
    Rule(
        "optimizer_offload_decoupled",
        "optimizer offload without `optimizer.decoupled_weight_decay`",
        lambda config: config.optimizer.optimizer_cpu_offload and not config.optimizer.decoupled_weight_decay,
        "CPU offloading only supported with decoupled_weight_decay enabled (AdamW mode)",
        "optimizer.decoupled_weight_decay=True",
        MEGATRON,
    ),
)
