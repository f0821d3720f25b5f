"""The value model: an AutoModel trunk whose language-model head is replaced by one number a position."""

# Shapes: B rows, T tokens, H hidden, N action tokens.

import torch
from nemo_automodel.components.distributed.mesh_utils import get_fsdp_dp_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn import functional

from molt.train.actor.batch import Batch
from molt.train.actor.model import Policy, load_policy
from molt.train.config import ActorConfig
from molt.train.errors import ConfigError


class ValueHead(torch.nn.Linear):
    """From the last hidden state [..., H] to a value [..., 1], in float32 whatever the trunk computes in.

    It starts at zero: until something is learned every value is 0, and the advantages of `gae` are plain returns.
    """

    def __init__(self, hidden_size: int, *, device: torch.device):
        super().__init__(hidden_size, 1, dtype=torch.float32, device=device)

    def reset_parameters(self) -> None:
        """All zeros, on every rank alike."""
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # the name that torch gives it
        """Values [..., 1] of hidden states [..., H]."""
        with torch.autocast(input.device.type, enabled=False):
            return functional.linear(input.float(), self.weight, self.bias)


def load_value_model(path: str, settings: ActorConfig) -> Policy:
    """Load the checkpoint at `path` as `load_policy` does, and give it a value head in place of its own.

    The head takes the old one's place in the module, so the model's own forward pass computes the values, and with it
    FSDP, mixed precision and activation checkpointing stay as they are. The old head is a unit of FSDP of its own, or
    tied to the input embeddings, so nothing of it is left behind.

    Raises:
        ConfigError: The model has no language-model head that could be replaced.
    """
    policy = load_policy(path, settings)
    model: torch.nn.Module = policy.model
    old = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    if old is None:
        raise ConfigError(f"critic.path {path!r} has no language-model head to replace: give a causal language model")
    head = ValueHead(old.weight.shape[-1], device=policy.device)
    if isinstance(model, FSDPModule):
        fully_shard(
            head,
            mesh=get_fsdp_dp_mesh(policy.mesh.device_mesh),
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32),
            offload_policy=policy.mesh.strategy_config.offload_policy or OffloadPolicy(),
        )
    model.set_output_embeddings(head)  # pyright: ignore[reportCallIssue]
    return policy


def action_values(model: Policy, batch: Batch) -> torch.Tensor:
    """V of the state before each action token of `batch`, float32 [N]: read where that token is predicted."""
    with model.autocast():
        values_BT1 = model.model(
            input_ids=batch.input_ids_BT,
            attention_mask=batch.attention_mask_BT,
            position_ids=batch.position_ids_BT,
            use_cache=False,
        ).logits
    # An empty selection still is part of the graph: every rank runs the same backward.
    return values_BT1.squeeze(-1)[batch.predicts_action_BT].float()
