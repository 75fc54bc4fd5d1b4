"""What a plan decides, what it is asked, and what it answers."""

from __future__ import annotations

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model is spread over GPUs.

    Attributes:
        num_gpus: in all.
        tensor, pipeline, context, expert: parallel sizes.
        gpus_per_node: of one machine, which share its host memory.
    """

    num_gpus: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        model_parallel = self.tensor * self.pipeline * self.context
        if self.num_gpus % model_parallel:
            raise ValueError(
                f"--gpus {self.num_gpus} is not a multiple of tensor x pipeline x context = {model_parallel}; every "
                "copy of the model takes that many GPUs"
            )
        if self.num_gpus % (self.pipeline * self.expert):
            raise ValueError(
                f"--gpus {self.num_gpus} is not a multiple of pipeline x expert = {self.pipeline * self.expert}; "
                "choose another --ep"
            )

    @property
    def data(self) -> int:
        """Copies of the dense part of the model."""
        return self.num_gpus // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Copies of the experts."""
        return self.num_gpus // (self.pipeline * self.expert)

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a machine's host memory."""
        return min(self.num_gpus, self.gpus_per_node)


@dataclasses.dataclass(frozen=True)
class Choice:
    """One setting of everything that a plan decides.

    Attributes:
        micro_batch: sequences in one forward and backward.
        fraction: of the optimizer state on the host.
        placement: ``"auto"``, ``"streamed"`` or ``"host"``.
        staging_gib: GPU memory that host state may visit beyond the highest peak.
        recompute_layers: layers whose activations are computed again.
        offload_layers: layers whose activations are offloaded.
    """

    micro_batch: int
    fraction: float = 0.0
    placement: str = "auto"
    staging_gib: float = 0.0
    recompute_layers: int = 0
    offload_layers: int = 0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a choice takes.

    Attributes:
        gpu_bytes: at the peak, by purpose, on the most loaded rank; torch's allocations.
        host_bytes: by purpose, of that rank.
        seconds: by where they go; a part that is hidden behind another is not in it.
    """

    gpu_bytes: dict[str, int]
    host_bytes: dict[str, int]
    seconds: dict[str, float]

    @property
    def gpu_peak_bytes(self) -> int:
        """The peak on the GPU."""
        return sum(self.gpu_bytes.values())

    @property
    def host_total_bytes(self) -> int:
        """What the rank holds on the host."""
        return sum(self.host_bytes.values())

    @property
    def step_seconds(self) -> float:
        """The time of a step."""
        return sum(self.seconds.values())


@dataclasses.dataclass(frozen=True)
class Budget:
    """What there is for one rank.

    Attributes:
        gpu_bytes: of its GPU.
        host_bytes: of the host, its share; None: not limited.
    """

    gpu_bytes: int
    host_bytes: int | None = None

    @property
    def usable_gpu_bytes(self) -> int:
        """What torch may allocate: the context, libraries and modules stay outside, and 3% for fragmentation."""
        return int((self.gpu_bytes - CONTEXT_BYTES) * (1 - FRAGMENTATION))

    def fits(self, estimate: Estimate) -> bool:
        """Return whether an estimate is within both."""
        host_fits = self.host_bytes is None or estimate.host_total_bytes <= self.host_bytes
        return host_fits and estimate.gpu_peak_bytes <= self.usable_gpu_bytes


CONTEXT_BYTES = int(0.7 * GIB)
"""What a CUDA context with its modules takes beside torch's allocator; 0.5 to 0.8 GiB on recent GPUs."""
FRAGMENTATION = 0.03
