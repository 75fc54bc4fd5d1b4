"""Memory and time of a step in Megatron, on the most loaded rank.

What stays (weights, gradients in fp32, optimizer state sharded over data-parallel ranks) agrees within 2% with the
figures that Megatron Bridge publishes for Qwen3-30B-A3B. There, offloading all of the optimizer saves 8 bytes a
parameter of the rank's shard: the moments leave, the fp32 masters stay on the GPU. Activations are those of fused
kernels with sequence parallelism, counted as by Korthikanti et al. (2022) for a gated feed-forward block.
"""

from __future__ import annotations

from forebay.config.schema import Config
from forebay.plan.model import Layer, Model
from forebay.plan.options import Choice, Estimate, Layout
from forebay.plan.profile import Profile

_GRADIENT_BYTES = 4  # gradients are accumulated and reduced in fp32
_MASTER_BYTES = 4
_MOMENT_BYTES = 8
_LOGIT_BYTES = 10
_WORKSPACE_BYTES = 256 * 2**20
# Bytes of host memory that the update of one parameter takes: gradient and weight in fp32 there and back, casts, and an
# optimizer that is several passes. 0.83 ns a parameter on the H200's host (119 GB/s) in benchmarks/results, 1.67 ns on
# that of a DGX H100 (61 GB/s) in the published figures: about 100 bytes both times.
_HOST_BYTES_PER_PARAM = 100
_OVERLAP_GAIN = 0.93  # published: 3877 ms in place of 4189
_MATMUL_SHARE = 0.65  # of the rate of large products: smaller ones, and kernels between them
_ATTENTION_RATE = 0.75
_EXPERTS_RATE = 0.6
_ELEMENTWISE_TRAFFIC = 6.0  # fused kernels move half of what separate ones do


class MegatronPlanner:
    """Estimates choices for one model, configuration, machine and layout.

    Args:
        model: what is trained.
        config: sequence length, global batch and offload settings are read.
        profile: the machine.
        layout: how the model is spread.
    """

    def __init__(self, model: Model, config: Config, profile: Profile, layout: Layout) -> None:
        self._model = model
        self._config = config
        self._profile = profile
        self._layout = layout

    def estimate(self, choice: Choice) -> Estimate:
        """Return what a choice takes on the stage that needs the most memory, and the time of a step."""
        stages = {0, self._layout.pipeline - 1}
        gpu = max((self._gpu_bytes(choice, stage) for stage in sorted(stages)), key=lambda bytes_: sum(bytes_.values()))
        return Estimate(gpu, self._host_bytes(choice), self._seconds(choice))

    def num_micro_batches(self, choice: Choice) -> int:
        """Return how many micro-batches each copy of the model has in a step, at least 1."""
        return max(1, self._config.train.global_batch_size // (choice.micro_batch * self._layout.data))

    def state_bytes(self) -> int:
        """Return what can be offloaded of the optimizer state of the most loaded rank: its moments."""
        return int(_MOMENT_BYTES * max(self._shard(stage) for stage in (0, self._layout.pipeline - 1)))

    def _layers(self, stage: int) -> tuple[Layer, ...]:
        per_stage = -(-len(self._model.layers) // self._layout.pipeline)
        return self._model.layers[stage * per_stage : (stage + 1) * per_stage]

    def _params(self, stage: int) -> tuple[float, float]:
        """Return the dense and the expert parameters of a rank of a stage."""
        model, layout = self._model, self._layout
        layers = self._layers(stage)
        dense = float(sum(layer.dense_params for layer in layers))
        if stage == 0:
            dense += model.embedding_params
        if stage == layout.pipeline - 1:
            # A tied head is a copy of the embedding where they are on different stages.
            dense += model.head_params or (model.embedding_params if layout.pipeline > 1 else 0)
            dense += model.other_params
        return dense / layout.tensor, sum(layer.expert_params for layer in layers) / layout.expert

    def _shard(self, stage: int) -> float:
        """Return the parameters whose optimizer state a rank holds."""
        dense, experts = self._params(stage)
        # Context-parallel ranks share the state too.
        return dense / (self._layout.data * self._layout.context) + experts / self._layout.expert_data

    def static_bytes(self, choice: Choice, stage: int = 0) -> dict[str, int]:
        """Return what a rank holds between steps: weights, gradients and optimizer state."""
        params = sum(self._params(stage))
        stays = _MASTER_BYTES + _MOMENT_BYTES * (1 - choice.fraction)
        return {
            "weights": int(self._model.item_bytes * params),
            "gradients": int(_GRADIENT_BYTES * params),
            "optimizer state": int(stays * self._shard(stage)),
        }

    def layer_bytes_per_token(self, layer: Layer) -> float:
        """Return what a layer keeps of a token on one rank, in bytes."""
        model, layout = self._model, self._layout
        hidden, query, key, item = model.hidden_size, model.query_width, model.key_width, model.item_bytes
        # Inputs of both norms, of the projections and of the block; queries, keys, values, and attention's output.
        kept = item * (4.0 * hidden + 2 * query + 2 * key)
        if layer.expert_params:
            # Each expert's token: gathered, gate and up, their product, and the output that is combined.
            kept += item * model.experts_per_token * (2.0 * hidden + 3 * model.ffn_width) + 4.0 * model.num_experts
        else:
            kept += item * 3.0 * model.ffn_width
        return kept / (layout.tensor * layout.context)

    def _gpu_bytes(self, choice: Choice, stage: int) -> dict[str, int]:
        model, layout = self._model, self._layout
        tokens = choice.micro_batch * self._config.dataset.seq_length
        in_flight = min(layout.pipeline - stage, self.num_micro_batches(choice))
        layers = self._layers(stage)
        recomputed = min(choice.recompute_layers, len(layers))
        stays = len(layers) - recomputed - choice.offload_layers
        per_layer = [self.layer_bytes_per_token(layer) for layer in layers]
        inputs = model.item_bytes * model.hidden_size / (layout.tensor * layout.context)
        kept = in_flight * (sum(per_layer[len(layers) - stays :]) + recomputed * inputs)
        if recomputed or choice.offload_layers:
            kept += max(per_layer) * (2 if choice.offload_layers else 1)
        gpu = {**self.static_bytes(choice, stage), "activations": int(tokens * kept)}
        if stage == layout.pipeline - 1:
            share = layout.tensor * layout.context
            gpu["logits and loss"] = int(tokens * model.vocab_size * _LOGIT_BYTES / share)
        gpu["workspaces"] = _WORKSPACE_BYTES
        return {name: num_bytes for name, num_bytes in gpu.items() if num_bytes}

    def _host_bytes(self, choice: Choice) -> dict[str, int]:
        shard = max(self._shard(stage) for stage in (0, self._layout.pipeline - 1))
        host = {
            # HybridDeviceOptimizer keeps fp32 weights and gradients beside the moments.
            "optimizer state": int(_MOMENT_BYTES * choice.fraction * shard),
            "weights": int(4 * choice.fraction * shard),
            "gradients": int(4 * choice.fraction * shard),
        }
        if choice.offload_layers:
            layers = self._layers(0)[: choice.offload_layers]
            tokens = choice.micro_batch * self._config.dataset.seq_length
            host["activations"] = int(tokens * sum(map(self.layer_bytes_per_token, layers)))
        return {name: num_bytes for name, num_bytes in host.items() if num_bytes}

    def _seconds(self, choice: Choice) -> dict[str, float]:
        model, layout, rate = self._model, self._layout, self._profile.rate
        count = self.num_micro_batches(choice)
        tokens = choice.micro_batch * self._config.dataset.seq_length / layout.context
        flops = _MATMUL_SHARE * rate("matmul_tflops") * 1e12
        layers = self._layers(0)
        share = tokens / layout.tensor
        experts = sum(
            2.0 * layer.expert_params * model.experts_per_token / model.num_experts
            for layer in layers
            if layer.expert_params
        )
        head = 2.0 * (model.head_params or model.embedding_params) / layout.pipeline
        dense = sum(layer.flops_per_token for layer in layers) - experts + head
        attention = 2.0 * model.query_width * self._config.dataset.seq_length * len(layers)
        products = share * (dense + experts / _EXPERTS_RATE) / flops
        scores = share * attention / (_ATTENTION_RATE * rate("matmul_tflops") * 1e12)
        kept = choice.micro_batch * self._config.dataset.seq_length * sum(map(self.layer_bytes_per_token, layers))
        elementwise = kept * _ELEMENTWISE_TRAFFIC / (rate("gpu_memory_gbps") * 1e9)
        forward = products + scores + elementwise / 3
        seconds = {
            "matrix products": 3 * count * products,
            "attention": 3.5 * count * scores,
            "elementwise": count * elementwise,
            "recomputation": count * forward * min(choice.recompute_layers, len(layers)) / len(layers),
            "communication": count * self._communication_seconds(share, layers),
        }
        bubble = (layout.pipeline - 1) / count
        seconds["pipeline bubble"] = bubble * sum(seconds.values())
        if choice.offload_layers:
            offloaded = self._host_bytes(choice)["activations"]
            down, up = offloaded / (rate("down_gbps") * 1e9), offloaded / (rate("up_gbps") * 1e9)
            seconds["waiting for activations"] = count * (max(0.0, down - forward) + max(0.0, up - 2 * forward))
        seconds["optimizer"] = self._optimizer_seconds(choice)
        return {name: value for name, value in seconds.items() if value}

    def _optimizer_seconds(self, choice: Choice) -> float:
        shard = max(self._shard(stage) for stage in (0, self._layout.pipeline - 1))
        on_gpu = 30 * (1 - choice.fraction) * shard / (self._profile.rate("gpu_memory_gbps") * 1e9)
        on_host = _HOST_BYTES_PER_PARAM * choice.fraction * shard / (self._profile.rate("host_memory_gbps") * 1e9)
        overlap = _OVERLAP_GAIN if self._config.optimizer.overlap_cpu_optimizer_d2h_h2d else 1.0
        return on_gpu + on_host * overlap

    def _communication_seconds(self, tokens: float, layers: tuple[Layer, ...]) -> float:
        """Return what tensor and expert parallelism exchange for one micro-batch; that of data parallelism overlaps."""
        model, layout = self._model, self._layout
        seconds = 0.0
        width = model.item_bytes * model.hidden_size
        if layout.tensor > 1:
            # A gather and a scatter around attention and block, forward and backward, each of all tokens of the group.
            moved = 8 * len(layers) * tokens * layout.tensor * width * (layout.tensor - 1) / layout.tensor
            seconds += moved / (self._profile.needs("gpu_link_gbps") * 1e9)
        routed = sum(1 for layer in layers if layer.expert_params)
        if layout.expert > 1 and routed:
            within = layout.expert * layout.tensor <= layout.gpus_per_node
            link = self._profile.needs("gpu_link_gbps" if within else "network_gbps") * 1e9
            # There and back, forward and backward.
            moved = 4 * routed * tokens * model.experts_per_token * width * (layout.expert - 1) / layout.expert
            seconds += moved / link
        return seconds
