"""Memory and time of a step of ``forebay train`` on one GPU.

Memory is the largest of the moments at which a step can peak:

- the loss's backward: all activations, logits with their log-softmax and two gradients, and gradients of earlier
  micro-batches; or instead of the loss, a layer's backward;
- the end of backward and the update: all gradients, and three chunks of streamed state.

Time adds matrix products at the calibrated rate, attention, elementwise work by its memory traffic, and what of the
optimizer's copies and host updates the next forward does not hide. Constants without a source in the profile were
fitted to the 1.1 B model on one H200 (docs/log.md).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import cast

import torch

from forebay.config.schema import Config, Placement
from forebay.plan.model import Layer, Model
from forebay.plan.options import GIB, Choice, Estimate
from forebay.plan.profile import Profile
from forebay.train.optimizers import optimizer_plan

# Logits in the weights' dtype are gone when the loss's backward runs; its peak is three fp32 tensors of their size.
_LOSS_BYTES_PER_LOGIT = 12
# Bytes that the loss reads and writes in all, per logit: casts, softmax, picking, and the same backward.
_LOSS_TRAFFIC_PER_LOGIT = 60
# cuBLAS takes its workspace from torch's allocator.
_WORKSPACE_BYTES = 64 * 2**20
# Of a layer's kept bytes: gradients of activations that are under way in its backward.
_BACKWARD_SHARE = 0.5
# Bytes that elementwise work moves, forward and backward, for every byte that autograd keeps; fitted.
_TRAFFIC_PER_SAVED_BYTE = 12.0
_FORWARD_SHARE = 1 / 3
# Attention kernels reach this share of the rate of plain matrix products, experts' grouped products that.
_ATTENTION_RATE = 0.75
_EXPERTS_RATE = 0.6
# Python takes about this long for a layer's forward and backward in transformers; the GPU waits if it is faster.
_PYTHON_SECONDS_PER_LAYER = 0.006
# Share of the next forward that hides copies and host updates; and of staging's copies up, what backward hides.
_HIDDEN_SHARE = 0.8
_STAGING_HIDDEN_SHARE = 0.35


class NativePlanner:
    """Estimates choices for one model, configuration and machine.

    Args:
        model: what is trained.
        config: sequence length, global batch, optimizer and dtypes are read.
        profile: the machine.
    """

    def __init__(self, model: Model, config: Config, profile: Profile) -> None:
        self._model = model
        self._config = config
        self._profile = profile
        self._optimizer_bytes = functools.cache(self._plan_optimizer)

    def estimate(self, choice: Choice) -> Estimate:
        """Return what a choice takes."""
        gpu, host = self._memory(choice)
        return Estimate(gpu, host, self._seconds(choice))

    def num_micro_batches(self, choice: Choice) -> int:
        """Return how many micro-batches a step has."""
        return self._config.train.global_batch_size // choice.micro_batch

    def state_bytes(self) -> int:
        """Return the bytes of all optimizer state, where nothing is offloaded."""
        return self._optimizer_bytes(0.0, "auto")["device"].get("optimizer_state", 0)

    def _plan_optimizer(self, fraction: float, placement: str) -> dict[str, dict[str, int]]:
        options = dataclasses.replace(
            self._config.optimizer,
            optimizer_offload_placement=cast(Placement, placement),
            overlap_cpu_optimizer_d2h_h2d=True,
        )
        config = dataclasses.replace(self._config, optimizer=options)
        return optimizer_plan(config, self._model.params, torch.device("cuda"), fraction=fraction)

    def _memory(self, choice: Choice) -> tuple[dict[str, int], dict[str, int]]:
        tokens = choice.micro_batch * self._config.dataset.seq_length
        optimizer = self._optimizer_bytes(choice.fraction, choice.placement)
        weights = self._model.item_bytes * self._model.num_params
        accumulated = weights if self.num_micro_batches(choice) > 1 else 0
        at_end = {"gradients": weights, "staging": optimizer["device"].get("staging", 0)}
        moments = (self._at_loss(choice, tokens, accumulated), self._in_layer(choice, tokens, accumulated), at_end)
        gpu = {
            "weights": weights,
            "optimizer state": optimizer["device"].get("optimizer_state", 0),
            **max(moments, key=lambda purposes: sum(purposes.values())),
            "workspaces": _WORKSPACE_BYTES,
        }
        gpu["staging"] = gpu.get("staging", 0) + int(choice.staging_gib * GIB)
        host: dict[str, int] = {}
        for tier in ("pinned", "pageable"):
            for purpose, num_bytes in optimizer[tier].items():
                name = purpose.replace("_", " ")
                host[name] = host.get(name, 0) + num_bytes
        if choice.offload_layers:
            # One micro-batch's at a time: they are back before the next forward.
            host["activations"] = int(tokens * self._offloaded_bytes_per_token(choice))
        return {name: num for name, num in gpu.items() if num}, host

    def _staying_layers(self, choice: Choice) -> tuple[Layer, ...]:
        """Return the layers that keep their activations: the last ones, which backward needs at once."""
        return self._model.layers[choice.recompute_layers + choice.offload_layers :]

    def _outside_bytes_per_token(self, choice: Choice) -> float:
        """Return what is there until the first layer's backward: inputs of recomputed layers, and the embedding's."""
        inputs = self._model.item_bytes * self._model.hidden_size
        return inputs * choice.recompute_layers + self._model.outside_bytes_per_token

    def _at_loss(self, choice: Choice, tokens: int, accumulated: int) -> dict[str, int]:
        """Return what the loss's backward finds: everything that forward has left, and its own tensors."""
        kept = sum(layer.saved_bytes_per_token for layer in self._staying_layers(choice))
        return {
            "gradients": accumulated,
            "activations": int(tokens * (kept + self._outside_bytes_per_token(choice))),
            "logits and loss": tokens * self._model.vocab_size * _LOSS_BYTES_PER_LOGIT,
        }

    def _in_layer(self, choice: Choice, tokens: int, accumulated: int) -> dict[str, int]:
        """Return what the most demanding layer's backward finds: the first that was not kept, else the last."""
        model, staying = self._model, self._staying_layers(choice)
        biggest = max(layer.saved_bytes_per_token for layer in model.layers)
        gradients = accumulated
        if choice.recompute_layers or choice.offload_layers:
            # What the layers behind it kept is gone, and their gradients are there. An offloaded layer has the next
            # one arriving beside it.
            kept = biggest * (2 if choice.offload_layers else 1)
            if not accumulated:
                behind = sum(layer.dense_params + layer.expert_params for layer in staying)
                gradients = model.item_bytes * (behind + (model.head_params or model.embedding_params))
        else:
            kept = sum(layer.saved_bytes_per_token for layer in staying)
        # A weight's new gradient is made beside the sum that it is added to.
        beside = max(layer.dense_params + layer.expert_params for layer in model.layers) if accumulated else 0
        return {
            "gradients": gradients,
            "activations": int(tokens * (kept + self._outside_bytes_per_token(choice))),
            "temporary": int(tokens * biggest * _BACKWARD_SHARE) + model.item_bytes * beside,
        }

    def _offloaded_bytes_per_token(self, choice: Choice) -> float:
        return sum(layer.saved_bytes_per_token for layer in self._model.layers[: choice.offload_layers])

    def forward_seconds(self, choice: Choice) -> dict[str, float]:
        """Return the forward of one micro-batch: matrix products, attention, elementwise work."""
        model, rate = self._model, self._profile.rate
        seq_length = self._config.dataset.seq_length
        tokens = choice.micro_batch * seq_length
        flops = rate("matmul_tflops") * 1e12
        experts = sum(self._expert_flops(layer) for layer in model.layers)
        dense = sum(layer.flops_per_token for layer in model.layers) - experts
        dense += 2.0 * (model.head_params or model.embedding_params)
        # Half of all pairs of positions: causal.
        attention = 2.0 * model.query_width * seq_length * len(model.layers)
        saved = tokens * (model.saved_bytes_per_token() + model.outside_bytes_per_token)
        return {
            "matrix products": tokens * (dense / flops + experts / (_EXPERTS_RATE * flops)),
            "attention": tokens * attention / (_ATTENTION_RATE * flops),
            "elementwise": saved * _TRAFFIC_PER_SAVED_BYTE * _FORWARD_SHARE / (rate("gpu_memory_gbps") * 1e9),
        }

    def _expert_flops(self, layer: Layer) -> float:
        model = self._model
        return 2.0 * layer.expert_params * model.experts_per_token / model.num_experts if layer.expert_params else 0.0

    def _seconds(self, choice: Choice) -> dict[str, float]:
        model, count = self._model, self.num_micro_batches(choice)
        forward = self.forward_seconds(choice)
        tokens = choice.micro_batch * self._config.dataset.seq_length
        memory_rate = self._profile.rate("gpu_memory_gbps") * 1e9
        # Backward of matrix products is two of them; of attention five products for two.
        seconds = {
            "matrix products": 3 * count * forward["matrix products"],
            "attention": 3.5 * count * forward["attention"],
            "elementwise": count * forward["elementwise"] / _FORWARD_SHARE,
            "loss": count * tokens * model.vocab_size * _LOSS_TRAFFIC_PER_LOGIT / memory_rate,
        }
        share = choice.recompute_layers / len(model.layers)
        seconds["recomputation"] = share * count * sum(forward.values())
        python = (1 + share / 3) * count * len(model.layers) * _PYTHON_SECONDS_PER_LAYER
        seconds["waiting for Python"] = max(0.0, python - sum(seconds.values()))
        if choice.offload_layers:
            seconds["waiting for activations"] = self._activation_seconds(choice, sum(forward.values()), count)
        seconds |= self._update_seconds(choice, sum(forward.values()))
        return {name: value for name, value in seconds.items() if value}

    def _activation_seconds(self, choice: Choice, forward: float, count: int) -> float:
        tokens = choice.micro_batch * self._config.dataset.seq_length
        offloaded = tokens * self._offloaded_bytes_per_token(choice)
        down = offloaded / (self._profile.rate("down_gbps") * 1e9)
        up = offloaded / (self._profile.rate("up_gbps") * 1e9)
        return count * (max(0.0, down - forward) + max(0.0, up - 2 * forward))

    def _update_seconds(self, choice: Choice, forward: float) -> dict[str, float]:
        """Return the update on the GPU, and what of copies and host updates nothing hides."""
        model = self._model
        optimizer = self._optimizer_bytes(choice.fraction, choice.placement)
        rates = {name: rate * 1e9 for name, rate in self._profile.rates().items()}
        on_device = optimizer["device"].get("optimizer_state", 0)
        host_weights = optimizer["pinned"].get("weights", 0)
        host_state = optimizer["pageable"].get("optimizer_state", 0) if host_weights else 0
        streamed = sum(optimizer[tier].get("optimizer_state", 0) for tier in ("pinned", "pageable")) - host_state
        weight_bytes = model.item_bytes * model.num_params - host_weights
        memory_rate = self._profile.rate("gpu_memory_gbps") * 1e9
        on_gpu = (2 * (on_device + streamed) + 4 * weight_bytes) / memory_rate
        bus = streamed / min(rates["up_both_gbps"], rates["down_both_gbps"])
        # The host kernel reads gradient, weight and state and writes weight and state. Without state streaming beside
        # it, it has the host's memory to itself.
        kernel_bytes = 3 * host_weights + 2 * host_state
        if streamed:
            host = kernel_bytes / rates["host_update_gbps"] + host_weights / rates["up_both_gbps"]
        else:
            host = kernel_bytes / (self._profile.rate("host_memory_gbps") * 1e9)
        hidden = _HIDDEN_SHARE * forward + _STAGING_HIDDEN_SHARE * choice.staging_gib * GIB / rates["up_both_gbps"]
        return {
            "update on the GPU": on_gpu,
            "waiting for copies and host updates": max(0.0, max(bus, host) - hidden),
        }
