"""What a rank's memory will hold, by item, before the first window is trained; no torch is needed to know.

Exact are weights, gradients and states. Activations are estimated from what autograd keeps of a decoder layer with
grouped-query attention and a gated feed-forward part, in Transformers' own implementation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from molt.train.config import ActorConfig, Config, OptimizerConfig
from molt.train.errors import ConfigError

FLOAT32 = 4
GIB = 1024**3
Role = Literal["policy", "critic", "reference", "teacher"]
Phase = Literal["always", "pass", "step", "host"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model that its memory follows from."""

    num_parameters: int
    num_embedding_parameters: int
    """Of the input embeddings and the head; once where they are tied."""
    num_matrix_parameters: int
    """Of the matrices that Muon moves."""
    num_layers: int
    hidden_size: int
    query_size: int
    """Of all query heads together."""
    key_value_size: int
    """Of all key heads together; those of the values are as many."""
    feed_forward_size: int
    """Of the experts that a token goes through together, where there are several."""
    num_experts_per_token: int
    """0: no mixture of experts."""
    vocabulary_size: int


@dataclass(frozen=True)
class MemoryItem:
    """Bytes of one kind, and when a rank's device holds them: `host` is host memory while `actor.offload` is on."""

    name: str
    num_bytes: int
    phase: Phase


@dataclass(frozen=True)
class MemoryPlan:
    """What one rank holds. During the passes there are activations, during the step there are none."""

    items: tuple[MemoryItem, ...]
    num_ranks: int

    @property
    def peak_bytes(self) -> int:
        """The most that the device holds at once."""
        always = self._total("always")
        return always + max(self._total("pass"), self._total("step"))

    def _total(self, phase: Phase) -> int:
        return sum(item.num_bytes for item in self.items if item.phase == phase)

    def render(self) -> str:
        """A table of one line an item, in GiB, largest first, and the peak."""
        notes = {"always": "", "pass": "forward and backward", "step": "optimizer step", "host": "host memory"}
        items = sorted(self.items, key=lambda item: -item.num_bytes)
        lines = [
            f"  {item.name:<26} {item.num_bytes / GIB:>9.3f}  {notes[item.phase]}".rstrip()
            for item in items
            if item.num_bytes
        ]
        head = f"memory of each of {self.num_ranks} rank(s), GiB, planned:"
        return "\n".join([head, *lines, f"  {'peak':<26} {self.peak_bytes / GIB:>9.3f}"])


def check_offload(settings: ActorConfig, *, has_cuda: bool) -> None:
    """Raise ConfigError where `actor.offload` would have no effect; to be called before anything is started."""
    if settings.offload == "none":
        return
    if not has_cuda:
        raise ConfigError(
            f"actor.offload is {settings.offload!r}, which has no effect without CUDA, where all memory is the host's: "
            "set it to 'none'"
        )
    if settings.offload == "full" and settings.num_ranks == 1:
        raise ConfigError(
            "actor.offload is 'full', which has no effect with actor.num_ranks 1, where nothing is sharded: set it to "
            "'optimizer', or actor.num_ranks to 2 or more"
        )


def plan_memory(config: Config, shapes: Mapping[Role, ModelShape]) -> MemoryPlan:
    """The plan of one rank of the actor with the models in `shapes`: the policy, and those that its ranks hold besides.

    Every model is held in float32, sharded over the ranks; they work one after the other, so the activations are those
    of the largest.
    """
    actor = config.actor
    items: list[MemoryItem] = []
    for role, shape in shapes.items():
        items.append(MemoryItem(f"{role}: weights", _sharded(actor, shape.num_parameters), _resting_phase(actor)))
        if role in ("policy", "critic"):
            settings = actor.optimizer if role == "policy" else config.critic.optimizer
            items += _trained(role, shape, actor, settings)
    num_compute_bytes = FLOAT32 if actor.dtype == "float32" else 2
    largest = max(shapes.values(), key=lambda shape: shape.num_parameters)
    tokens = config.train.microbatch_tokens
    logits = 2 * FLOAT32 * min(actor.logprob_chunk, tokens) * largest.vocabulary_size
    items += [
        MemoryItem("copies for computing", _copies(actor, largest, num_compute_bytes), "pass"),
        MemoryItem("activations", _activations(actor, largest, tokens, num_compute_bytes), "pass"),
        MemoryItem("a chunk of logits", logits + FLOAT32 * largest.vocabulary_size * largest.hidden_size, "pass"),
    ]
    return MemoryPlan(tuple(items), actor.num_ranks)


def compare(plan: MemoryPlan, measured_peak_bytes: int) -> str:
    """One line for the log: the planned peak beside the measured one."""
    planned = plan.peak_bytes
    return (
        f"memory after the first window: peak {measured_peak_bytes / GIB:.3f} GiB a rank, planned {planned / GIB:.3f} "
        f"({measured_peak_bytes / planned:.0%} of the plan)"
    )


def _sharded(actor: ActorConfig, num_values: int) -> int:
    return FLOAT32 * -(-num_values // actor.num_ranks)


def _resting_phase(actor: ActorConfig) -> Phase:
    return "host" if actor.offload == "full" else "always"


def _trained(role: Role, shape: ModelShape, actor: ActorConfig, settings: OptimizerConfig) -> list[MemoryItem]:
    """Gradients and the optimizer's states: two numbers a parameter by AdamW, one by Muon."""
    num_states = 2 * shape.num_parameters - (shape.num_matrix_parameters if settings.name == "muon" else 0)
    states_phase: Phase = "step" if actor.offload == "optimizer" else _resting_phase(actor)
    return [
        MemoryItem(f"{role}: gradients", _sharded(actor, shape.num_parameters), _resting_phase(actor)),
        MemoryItem(f"{role}: optimizer states", _sharded(actor, num_states), states_phase),
    ]


def _copies(actor: ActorConfig, shape: ModelShape, num_compute_bytes: int) -> int:
    """What a pass computes with: FSDP gathers embeddings, head and two layers, and a layer's gradient before it is cut.

    A single rank computes with its own weights, or with copies of all of them where the dtype differs.
    """
    if actor.num_ranks == 1:
        return 0 if num_compute_bytes == FLOAT32 else num_compute_bytes * shape.num_parameters
    layer = (shape.num_parameters - shape.num_embedding_parameters) // shape.num_layers
    gathered = num_compute_bytes * (shape.num_embedding_parameters + 2 * layer)
    return gathered + (num_compute_bytes + FLOAT32) * layer


def _activations(actor: ActorConfig, shape: ModelShape, num_tokens: int, num_compute_bytes: int) -> int:
    """Kept for the backward pass: of every layer, or the inputs of all and the rest of one where it is computed again.

    Residual stream and norms are kept in float32 (6 to 7 times the hidden size); in the computing dtype queries, keys,
    values and attention's output, once before and once after their norms and rotation, and four times the feed-forward
    size.
    """
    values = 4 * (shape.query_size + shape.key_value_size + shape.feed_forward_size)
    values += 2 * shape.num_experts_per_token * shape.hidden_size  # tokens copied to their experts and back
    layer = int(6.5 * FLOAT32) * shape.hidden_size + num_compute_bytes * values
    if actor.activation_checkpointing:
        return num_tokens * (shape.num_layers * FLOAT32 * shape.hidden_size + layer)
    return num_tokens * shape.num_layers * layer
