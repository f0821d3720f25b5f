"""The keys of a run, one frozen struct an owner. docs/configuration.md is made from these docstrings."""

from typing import Literal

from molt.train.config.algorithm import AlgorithmConfig, CriticConfig, RewardConfig
from molt.train.config.data import DataConfig, EvalConfig
from molt.train.config.optimizer import OptimizerConfig
from molt.train.config.pool import PoolConfig
from molt.train.config.section import Section


class ModelConfig(Section, frozen=True, kw_only=True):
    """The policy."""

    path: str = ""
    """Folder, or hub name, of a Hugging Face model with tokenizer and chat template."""
    name: str = "policy"
    """The model name that clients see."""
    tool_parser: str = "auto"
    """What reads tool calls out of replies. `auto`: the format of Hermes and Qwen3 (`hermes`), which has to be what the
    chat template writes; else a name as `vllm serve --tool-call-parser` takes it."""
    reasoning_parser: str = "auto"
    """What tells reasoning from text. `auto`: `<think>` with the Hermes format, else none; `none`; or a name as
    `vllm serve --reasoning-parser` takes it."""


class RunConfig(Section, frozen=True, kw_only=True):
    """The run as a whole."""

    dir: str = ""
    """The run folder. A run started on a folder that holds one resumes it."""
    seed: int = 0
    """Of the order of tasks, of torch and, with `rollout.seeded`, of every model call. What arrives first, and so is
    trained first, still differs between runs."""
    stall_timeout: float = 300.0
    """Seconds in which nothing happens after which the run reports who waits for whom, and stops. Attempts that come to
    nothing stretch it, by `pool.max_attempts` times `rollout.timeout_s` at most."""


class TrainConfig(Section, frozen=True, kw_only=True):
    """The training loop."""

    num_updates: int = 100
    """Updates of the whole run, those before a resume included."""
    groups_per_update: int = 16
    """Groups in the window of one update."""
    max_staleness: int = 1
    """How many policy versions a trained token may be older than the weights it updates. 0: strictly on-policy."""
    checkpoint_every: int = 10
    """Updates between checkpoints; the last update always makes one. 0: only that."""
    keep_checkpoints: int = 2
    """The newest checkpoints that stay; older ones are removed."""
    microbatch_tokens: int = 16384
    """Most tokens, padding included, in one forward and backward pass."""
    on_stale: Literal["drop", "release"] = "drop"
    """A group that got too old to be trained: `drop` it and go on with other tasks, or `release` its task to be rolled
    out anew."""
    drop_degenerate: bool = False
    """Replace groups whose rollouts all have one reward, which teach a comparison nothing, by further ones (dynamic
    sampling, arXiv:2503.14476)."""
    max_refill: float = 10.0
    """`drop_degenerate`: most groups replaced for one update, as a multiple of `groups_per_update`; beyond it the run
    stops."""


class RolloutConfig(Section, frozen=True, kw_only=True):
    """How rollouts are sampled."""

    group_size: int = 8
    """Rollouts of one prompt."""
    oversample: int = 0
    """Further rollouts of each prompt. The first `group_size` that count make the group; those still running are cut,
    which favours what is quick."""
    max_tokens: int = 1024
    """Most tokens of one model call."""
    temperature: float = 1.0
    """Divides the logits, in the engine and in the loss."""
    top_p: float = 1.0
    """Nucleus sampling; below 1 only without a correction."""
    sampling_policy: Literal["enforce", "default", "client"] = "enforce"
    """`enforce`: the run's sampling always; `default`: where the client sends none; `client`: the client's."""
    timeout_s: float = 600.0
    """Seconds one rollout may take."""
    seeded: bool = True
    """Give each model call of a lease a sampling seed made of `run.seed`, its task, rollout and attempt, and its place
    among the rollout's calls. False: the engines draw as requests come, which is faster where they make the noise of
    seeded requests one by one, as vLLM does on the CPU and in its first GPU model runner."""
    train_off_policy: bool = False
    """Train turns that were sampled in a way that the loss cannot correct too: bound by a grammar (required tool calls,
    a response format), greedily, or with top-k, min-p, penalties, a logit bias or another top-p than the run's."""
    train_auxiliary: bool = False
    """Train side calls too, such as an agent's title generator."""


class ActorConfig(Section, frozen=True, kw_only=True):
    """The trained policy: AutoModel and FSDP2, one Ray actor a rank."""

    num_ranks: int = 1
    """Data-parallel ranks, each with a GPU of its own where there are any."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward pass; master weights and gradients' reduction are float32."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    layout: Literal["padded", "packed"] = "padded"
    """Rows of a microbatch padded to the longest, or end to end. The attention kernel in use computes what stands
    between packed rows, too: they save the padding of the other layers, and cost more where rows are many and long."""
    logprob_chunk: int = 1024
    """Action tokens whose logits exist at a time, in the forward and in the backward pass."""
    offload: Literal["none", "optimizer", "full"] = "none"
    """What lies in host memory while it is not used: nothing, the optimizer's states, or weights, gradients and states.
    Needs CUDA."""
    max_restarts: int = 2
    """Deaths of ranks that a run survives: all ranks start anew from the last checkpoint, and the windows recorded
    since are trained again."""
    optimizer: OptimizerConfig = OptimizerConfig()


class EngineConfig(Section, frozen=True, kw_only=True):
    """The serving engines."""

    num_engines: int = 1
    """Replicas of the policy that serve; sessions stick to one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the served weights."""
    max_model_len: int = 32768
    """Context window in tokens, prompt and reply together."""
    max_num_seqs: int = 64
    """Sequences that an engine decodes at once; others wait in it."""
    kv_cache_mb: int = 64
    """KV cache of a CPU engine in MiB; a CUDA engine takes `gpu_memory_utilization`."""
    gpu_memory_utilization: float = 0.85
    """Fraction of a GPU that its engine takes."""
    tensor_parallel_size: int = 1
    """Workers, and on CUDA GPUs, of one engine."""
    max_restarts: int = 3
    """Engine deaths that a run survives."""
    on_refit: Literal["keep", "wait", "abort"] = "keep"
    """What new weights do to generations under way: `keep` holds them and goes on with what they have sampled (partial
    rollout); `wait` lets them finish first; `abort` samples them anew."""
    keep_stale_cache: bool = False
    """Let new prompts find keys and values of older weights in the prefix cache: less prefill, further off policy."""
    verify_refit: Literal["sample", "full"] = "sample"
    """Compare what engines hold after a refit with what was sent: a `sample` of every weight, or all of it."""


class AgentConfig(Section, frozen=True, kw_only=True):
    """The agent and the local workers that `molt-train run` starts."""

    path: str = ""
    """The agent module: a file, or a dotted module name."""
    num_workers: int = 2
    """Worker processes."""
    concurrency: int = 32
    """Rollouts at once a worker."""


class GatewayConfig(Section, frozen=True, kw_only=True):
    """The model endpoint under a session URL."""

    grace_s: float = 5.0
    """Seconds before the generation of a vanished client is aborted."""
    replay_s: float = 600.0
    """Seconds that a reply which did not reach its client is kept for a client that asks the same again."""
    keepalive_s: float = 10.0
    """Seconds of silence after which a stream is sent a sign of life."""
    hold_s: float = 120.0
    """Seconds that a request waits for an engine, or for its session to have fewer than `max_session_requests` calls
    under way."""
    max_body_bytes: int = 64 * 1024 * 1024
    """Largest body of a model call, packed and unpacked."""
    header_timeout_s: float = 10.0
    """Seconds in which the head of a request must be complete, on any route; afterwards its connection is closed."""
    min_body_bytes_per_s: int = 1024
    """Slowest rate of a request's body, on any route, over any `gateway.header_timeout_s` of it. 0: any rate."""
    write_timeout_s: float = 60.0
    """Seconds in which a client must take some of what is sent to it, on any route; otherwise it counts as gone."""
    max_session_requests: int = 64
    """Model calls of one session at once; more wait."""


class ServerConfig(Section, frozen=True, kw_only=True):
    """Where the server listens."""

    host: str = "127.0.0.1"
    """The address to listen on; one that other machines can reach needs a token of 16 characters or more."""
    port: int = 0
    """0: any free one."""
    public_url: str = ""
    """The origin that workers and agents on other machines reach the server at, `http://host:port`; empty: the address
    it listens on."""
    token: str = ""
    """The workers' bearer token; empty: a new random one, on loopback only."""


class SftConfig(Section, frozen=True, kw_only=True):
    """The supervised step, `molt-train sft`."""

    batch_size: int = 64
    """Conversations of one optimizer step."""


class ClusterConfig(Section, frozen=True, kw_only=True):
    """Ray."""

    address: str = ""
    """A running Ray cluster, `host:port`; empty: a local one, for this run only."""


class Config(Section, frozen=True, kw_only=True):
    """A run's whole configuration."""

    model: ModelConfig = ModelConfig()
    run: RunConfig = RunConfig()
    train: TrainConfig = TrainConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    actor: ActorConfig = ActorConfig()
    engine: EngineConfig = EngineConfig()
    agent: AgentConfig = AgentConfig()
    data: DataConfig = DataConfig()
    eval: EvalConfig = EvalConfig()
    pool: PoolConfig = PoolConfig()
    gateway: GatewayConfig = GatewayConfig()
    server: ServerConfig = ServerConfig()
    cluster: ClusterConfig = ClusterConfig()
    sft: SftConfig = SftConfig()
