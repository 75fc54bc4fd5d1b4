"""The configuration of a run, as typed dataclasses; each field is explained right below it.

Names, meanings and defaults are those of Megatron Bridge and Megatron Core where these have the setting.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

ParamsDtype = Literal["fp32", "bf16", "fp16"]
AttnImplementation = Literal["sdpa", "eager"]
RecomputeGranularity = Literal["full", "selective"]
CudaGraphImpl = Literal["none", "local", "transformer_engine"]
OptimizerName = Literal["adamw", "adam", "sgd"]
OffloadFraction = float | Literal["auto"]
Placement = Literal["auto", "streamed", "host"]
StateDtype = Literal["fp32", "bf16", "8bit"]
DecayStyle = Literal["cosine", "linear", "constant"]
EngineKind = Literal["auto", "cuda", "sim"]
CompileKind = Literal["none", "block", "model"]
ProgressKind = Literal["auto", "live", "plain", "none"]


@dataclass
class ModelConfig:
    """The model, what of it leaves the GPU, and how it is spread over GPUs."""

    hf_config: dict[str, Any] = field(default_factory=dict)
    """Fields of a transformers configuration, ``model_type`` among them. A folder in ``path`` brings its own."""
    path: str | None = None
    """Local checkpoint folder to take the model and its weights from. None: random weights."""
    num_layers: int | None = None
    """Number of transformer layers. None, here and for the sizes below: as ``hf_config`` says."""
    hidden_size: int | None = None
    """Width of the residual stream."""
    ffn_hidden_size: int | None = None
    """Width inside the feed-forward blocks that are not experts."""
    num_attention_heads: int | None = None
    """Number of query heads."""
    num_query_groups: int | None = None
    """Number of key/value heads that the query heads share."""
    kv_channels: int | None = None
    """Width of one attention head."""
    vocab_size: int | None = None
    """Number of token ids."""
    max_position_embeddings: int | None = None
    """Longest sequence that the positions are made for."""
    num_moe_experts: int | None = None
    """Number of experts in each mixture-of-experts layer."""
    moe_router_topk: int | None = None
    """Experts that each token goes to."""
    moe_ffn_hidden_size: int | None = None
    """Width inside one expert."""
    params_dtype: ParamsDtype = "bf16"
    """Data type of the parameters and gradients."""
    attn_implementation: AttnImplementation = "sdpa"
    """Attention of transformers: torch's fused kernels, or plain matrix products."""
    seed: int | None = None
    """Seed of random weights. None: ``train.seed``."""
    cpu_offloading: bool = False
    """Offload activations, weights or both of some layers to the host. Not in ``forebay train`` yet."""
    cpu_offloading_num_layers: int = 0
    """Number of layers to offload, from 0 to num_layers - 1."""
    cpu_offloading_activations: bool = True
    """With ``cpu_offloading``, offload what the layers save for backward."""
    cpu_offloading_weights: bool = False
    """With ``cpu_offloading``, offload the layers' weights."""
    cpu_offloading_double_buffering: bool = False
    """With ``cpu_offloading``, use two buffers while reloading."""
    cpu_offloading_retain_pinned_cpu_buffers: bool = False
    """With ``cpu_offloading``, keep the pinned buffers from step to step."""
    recompute_granularity: RecomputeGranularity | None = None
    """Compute activations again in backward: ``full`` for whole layers, ``selective`` for parts. None: keep them."""
    recompute_num_layers: int | None = None
    """Number of layers to recompute. None: all."""
    recompute_modules: list[str] = field(default_factory=list)
    """Parts to recompute with ``selective``."""
    cuda_graph_impl: CudaGraphImpl = "none"
    """What captures CUDA graphs. Not in ``forebay train`` yet."""
    pipeline_model_parallel_size: int = 1
    """Number of pipeline stages."""
    tensor_model_parallel_size: int = 1
    """GPUs that share each matrix."""
    context_parallel_size: int = 1
    """GPUs that share each sequence."""
    expert_model_parallel_size: int = 1
    """GPUs that share the experts."""
    fine_grained_activation_offloading: bool = False
    """Offload the inputs of chosen modules to the host. Not in ``forebay train`` yet."""
    offload_modules: list[str] = field(default_factory=list)
    """Modules whose inputs are offloaded by ``fine_grained_activation_offloading``."""
    min_offloaded_tensor_size: int = 1048576
    """Smaller tensors stay on the GPU, in elements."""
    activation_offload_fraction: float = 1.0
    """Share of the chosen modules' inputs that is offloaded, 0.0 to 1.0."""


@dataclass
class OptimizerConfig:
    """The optimizer, its learning rate, and where its state lives."""

    optimizer: OptimizerName = "adamw"
    """Update rule. ``adamw`` decouples weight decay; ``adam`` and ``sgd`` need ``decoupled_weight_decay=False``."""
    lr: float = 3e-4
    """Highest learning rate."""
    min_lr: float = 0.0
    """Lowest learning rate after warm-up."""
    lr_warmup_iters: int = 0
    """Steps over which the learning rate rises linearly."""
    lr_decay_iters: int | None = None
    """Step at which ``min_lr`` is reached, warm-up included. None: ``train.train_iters``."""
    lr_decay_style: DecayStyle = "cosine"
    """How the learning rate falls after warm-up."""
    weight_decay: float = 0.01
    """Decay of matrices; norms and biases are never decayed."""
    decoupled_weight_decay: bool = True
    """Decay the weights themselves (AdamW) and not the gradients."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the denominator."""
    clip_grad: float = 1.0
    """Highest norm of the gradient over all parameters. 0: do not clip."""
    optimizer_cpu_offload: bool = False
    """Hold a part of the optimizer state on the host; ``optimizer_offload_fraction`` says how much."""
    optimizer_offload_fraction: OffloadFraction = 0.0
    """Share of the optimizer state on the host, 0.0 to 1.0: moments and fp32 masters. ``auto``: the least that fits."""
    optimizer_offload_placement: Placement = "auto"
    """Who updates the host share: the GPU, to which its state is streamed, or the host. ``auto``: both."""
    optimizer_staging_gib: float = 0.0
    """GPU memory in GiB that host state may visit beyond the highest peak of a step."""
    optimizer_state_dtype: StateDtype = "fp32"
    """Dtype of the moments: ``fp32`` is exact, ``bf16`` and ``8bit`` are stored with stochastic rounding."""
    optimizer_early_updates: bool = False
    """Start host updates during backward, before the norm is known; up to 1 byte of host memory an element."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Overlap the transfers of optimizer offloading with compute."""
    use_torch_optimizer_for_cpu_offload: bool = False
    """Update the host share by ``torch.optim`` and not by forebay's kernel."""
    pin_cpu_grads: bool = True
    """Pin the host's copies of gradients."""
    pin_cpu_params: bool = True
    """Pin the host's copies of parameters and the state that is transferred."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over data-parallel GPUs."""


@dataclass
class TrainConfig:
    """How long, on how many sequences a step, and on what."""

    train_iters: int = 100
    """Number of steps."""
    global_batch_size: int = 8
    """Sequences in one step, a multiple of ``micro_batch_size``."""
    micro_batch_size: int = 1
    """Sequences in one forward and backward."""
    seed: int = 1234
    """Seed of everything random that has no seed of its own."""
    eval_interval: int | None = None
    """Steps between two evaluations. None: only after the last step."""
    eval_iters: int = 10
    """Micro-batches in one evaluation."""
    device: str = "auto"
    """``auto`` (the GPU if there is one), ``cpu``, ``cuda`` or ``cuda:N``."""
    engine: EngineKind = "auto"
    """What moves memory: CUDA streams, or the simulator on a CPU."""
    deterministic: bool = False
    """Use only kernels that give the same bits in every run."""
    compile: CompileKind = "none"
    """What ``torch.compile`` compiles: each transformer ``block``, or the ``model``. Not in ``forebay train`` yet."""


@dataclass
class DatasetConfig:
    """The text."""

    path: str | None = None
    """A .txt, .jsonl or .parquet file, or a folder of these. None: the source of Python's standard library."""
    tokenizer: str | None = None
    """Local folder with a tokenizer. None: a token is a byte."""
    seq_length: int = 1024
    """Tokens in a sequence."""
    text_key: str = "text"
    """Field or column that holds the text in .jsonl and .parquet."""
    eval_fraction: float = 0.01
    """Share of the text, at its end, that is only evaluated on. 0.0: no evaluation."""
    seed: int | None = None
    """Seed of the order of the text. None: ``train.seed``."""


@dataclass
class CheckpointConfig:
    """Where training is saved to and continued from."""

    save: str | None = None
    """Folder to write checkpoints to. None: none are written."""
    load: str | None = None
    """Checkpoint, or folder of checkpoints of which the last is taken, to continue from. None: start afresh."""
    save_interval: int | None = None
    """Steps between two checkpoints. None: only after the last step."""
    keep: int | None = 2
    """Number of latest checkpoints that are not removed. None: all."""


@dataclass
class LoggerConfig:
    """What a run writes about itself."""

    output_dir: str = "runs/unnamed"
    """Folder for ``metrics.jsonl`` and ``train.log``. Not set: ``runs/`` and the name of the recipe or file."""
    log_interval: int = 1
    """Steps between two printed lines; ``metrics.jsonl`` has every step."""
    tensorboard: bool | Literal["auto"] = "auto"
    """Also write TensorBoard event files. ``auto``: if tensorboard is installed."""
    progress: ProgressKind = "auto"
    """What is printed: one ``live`` line, one ``plain`` line a step, or ``none``. ``auto``: live on a terminal."""


@dataclass
class Config:
    """The whole configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """See :class:`ModelConfig`."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """See :class:`OptimizerConfig`."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """See :class:`TrainConfig`."""
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    """See :class:`DatasetConfig`."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """See :class:`CheckpointConfig`."""
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    """See :class:`LoggerConfig`."""
