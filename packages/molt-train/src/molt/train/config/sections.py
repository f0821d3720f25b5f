"""The keys of a run, one frozen struct an owner. docs/configuration.md is made from these docstrings."""

from typing import Literal

import msgspec


CLIP_LOW, CLIP_HIGH = 0.2, 0.28


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A TOML table."""


class ModelConfig(_Section):
    """The policy."""

    path: str = ""
    """Folder, or hub name, of a Hugging Face model with tokenizer and chat template."""
    name: str = "policy"
    """The model name that clients see."""


class RunConfig(_Section):
    """The run as a whole."""

    dir: str = ""
    """The run folder. A run started on a folder that holds one resumes it."""
    seed: int = 0
    stall_timeout: float = 300.0
    """Seconds without any progress after which the run reports who waits for whom, and stops."""


class TrainConfig(_Section):
    """The training loop."""

    num_updates: int = 100
    groups_per_update: int = 16
    max_staleness: int = 1
    """How many policy versions a trained token may be older than the weights it updates. 0: strictly on-policy."""
    checkpoint_every: int = 10
    """Updates between checkpoints; the last update always makes one. 0: only that."""
    keep_checkpoints: int = 2
    microbatch_tokens: int = 16384
    """Most tokens, padding included, in one forward and backward pass."""
    eval_every: int = 0
    """Updates between evaluations on `data.eval_path`. 0: only before the first and after the last update."""


class RolloutConfig(_Section):
    """How rollouts are sampled."""

    group_size: int = 8
    """Rollouts of one prompt."""
    max_tokens: int = 1024
    """Most tokens of one model call."""
    temperature: float = 1.0
    top_p: float = 1.0
    sampling_policy: Literal["enforce", "default", "client"] = "enforce"
    """`enforce`: the run's sampling always; `default`: where the client sends none; `client`: the client's."""
    timeout_s: float = 600.0
    """Seconds one rollout may take."""


class AlgorithmConfig(_Section):
    """Advantage, loss and correction."""

    estimator: Literal["grpo", "rloo", "group_mean", "reinforce_pp"] = "grpo"
    gamma: float = 1.0
    """Discount a token, over action tokens only (`reinforce_pp`)."""
    updates_per_window: int = 1
    """Optimizer steps a window, on equal shares of its groups. Above 1 the policy departs from the one that the window
    started with, which is what the clip bounds."""
    clip_low: float = CLIP_LOW
    """PPO clip: the ratio of the current policy to that before the window is clipped below 1 - clip_low."""
    clip_high: float = CLIP_HIGH
    """PPO clip: above 1 + clip_high."""
    correction: Literal["none", "tis", "icepop"] = "tis"
    """Token-level importance correction: `tis` truncates, min(rho, high); `icepop` masks, rho inside [low, high], else 0."""
    correction_low: float = 0.5
    correction_high: float = 2.0


class OptimizerConfig(_Section):
    """AdamW and its schedule."""

    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    """Where the cosine ends, as a fraction of lr."""
    max_grad_norm: float = 1.0


class ActorConfig(_Section):
    """The trained policy: AutoModel and FSDP2, one Ray actor a rank."""

    num_ranks: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward pass; master weights and gradients' reduction are float32."""
    activation_checkpointing: bool = False
    optimizer: OptimizerConfig = OptimizerConfig()


class EngineConfig(_Section):
    """The serving engines."""

    num_engines: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_model_len: int = 32768
    max_num_seqs: int = 64
    kv_cache_mb: int = 64
    """KV cache of a CPU engine in MiB; a CUDA engine takes `gpu_memory_utilization`."""
    gpu_memory_utilization: float = 0.85
    tensor_parallel_size: int = 1
    max_restarts: int = 3
    """Engine deaths that a run survives."""


class AgentConfig(_Section):
    """The agent and the local workers that `molt-train run` starts."""

    path: str = ""
    """The agent module: a file, or a dotted module name."""
    num_workers: int = 2
    concurrency: int = 32
    """Rollouts at once a worker."""


class DataConfig(_Section):
    """Task rows, JSONL."""

    path: str = ""
    eval_path: str = ""
    """Held-out rows for evaluation; empty: none."""
    eval_samples: int = 1
    """Rollouts of each held-out row."""
    shuffle: bool = True


class PoolConfig(_Section):
    """Leases."""

    max_attempts: int = 3
    """Attempts at one rollout before it is given up as its last outcome."""
    lease_ttl_s: float = 30.0
    """Seconds without a heartbeat after which a lease expires."""
    on_failed: Literal["drop", "zero_reward"] = "drop"
    """What a rollout whose agent failed, or ran out of time, counts as."""


class GatewayConfig(_Section):
    """The model endpoint under a session URL."""

    grace_s: float = 5.0
    """Seconds before the generation of a vanished client is aborted."""
    replay_s: float = 600.0
    keepalive_s: float = 10.0
    header_timeout_s: float = 10.0
    hold_s: float = 120.0
    """Seconds that a request waits for an engine."""
    max_body_bytes: int = 64 * 1024 * 1024
    max_session_requests: int = 64


class ServerConfig(_Section):
    """Where the server listens."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one."""
    public_url: str = ""
    """The origin that workers and agents on other machines reach the server at, `http://host:port`; empty: the address
    it listens on."""
    token: str = ""
    """The workers' bearer token; empty: a new random one, on loopback only."""


class SftConfig(_Section):
    """The supervised step, `molt-train sft`."""

    batch_size: int = 64
    """Conversations of one optimizer step."""


class ClusterConfig(_Section):
    """Ray."""

    address: str = ""
    """A running Ray cluster, `host:port`; empty: a local one, for this run only."""


class Config(_Section):
    """A run's whole configuration."""

    model: ModelConfig = ModelConfig()
    run: RunConfig = RunConfig()
    train: TrainConfig = TrainConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    engine: EngineConfig = EngineConfig()
    agent: AgentConfig = AgentConfig()
    data: DataConfig = DataConfig()
    pool: PoolConfig = PoolConfig()
    gateway: GatewayConfig = GatewayConfig()
    server: ServerConfig = ServerConfig()
    cluster: ClusterConfig = ClusterConfig()
    sft: SftConfig = SftConfig()
