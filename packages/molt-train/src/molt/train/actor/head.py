"""Log-probs of a batch's action tokens, computed by the model's own head at the action positions only."""

# Shapes: B rows, T tokens, N action tokens, H hidden, V vocabulary, K numbers a position.

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from nemo_automodel.components.distributed.parallel_styles import TPLinear
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from molt.train.actor.batch import Batch
from molt.train.actor.model import Policy
from molt.train.errors import ActorError, ConfigError
from molt.train.loss.logprob import gather_logprobs, head_logprobs

_CHANGE_LOGITS = (
    "final_logit_softcapping",
    "output_logit_soft_cap",
    "logits_soft_cap",
    "logits_scaling",
    "logit_scale",
    "logits_mup_width_multiplier",
    "output_multiplier",
    "lm_head_multiplier",
)
"""Settings of a model by which its forward pass changes the logits after the head."""


def action_logprobs(
    policy: Policy, batch: Batch, *, temperature: float, chunk_size: int, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of every action token of `batch` under the current weights, and the entropy where it was sampled.

    For the time of the forward pass the head takes action positions only and gives log-probs in place of logits, see
    `head_logprobs`. FSDP has the weight whole only there, and prepares a backward pass through the model's output
    only. Of a model that changes its logits after the head, as by a soft cap, or whose head is no matrix product, the
    logits of the action positions are computed.

    Args:
        policy: A causal language model; all ranks call it alike, those without an action token, too.
        batch: A microbatch.
        temperature: That of sampling, above 0.
        chunk_size: Action tokens whose logits exist at a time.
        with_entropy: Give entropies, too.

    Returns:
        Log-probs [N], and entropies [N] in nats or None; float32, part of the graph with N = 0, too.

    Raises:
        ConfigError: The model has no language-model head.
        ActorError: The model changes its logits by a setting that is not known here.
    """
    model: Any = policy.model
    head: Any = model.get_output_embeddings()
    if head is None:
        raise ConfigError(f"model.path: {type(model).__name__} has no language-model head: give a causal model")
    asked = {"temperature": temperature, "chunk_size": chunk_size, "with_entropy": with_entropy}
    given: list[Tensor] = []
    is_plain = _is_linear(head) and not _changes_logits(model.config)
    head_forward: Callable[[Tensor], Tensor] = head.forward

    def forward(hidden: Tensor) -> Tensor:
        hidden_NH, rewrap = _action_positions(hidden, batch.predicts_action_BT)
        if is_plain:
            found = head_logprobs(hidden_NH, head.weight, batch.targets_N, bias_V=head.bias, **asked)
            given.append(rewrap(torch.stack([values for values in found if values is not None], dim=-1).unsqueeze(0)))
        else:
            given.append(head_forward(rewrap(hidden_NH.unsqueeze(0))))
        return given[-1]

    with policy.autocast(), _forward_replaced(head, forward):
        output_1NK = model(
            input_ids=batch.input_ids_BT,
            attention_mask=batch.attention_mask_BT,
            position_ids=batch.position_ids_BT,
            use_cache=False,
        ).logits
    if not is_plain:
        return gather_logprobs(_whole(output_1NK)[0], batch.targets_N, **asked)
    if not any(_is_same(output_1NK, values) for values in given):
        raise ActorError(f"{type(model).__name__} changes its logits after the head, by none of {_CHANGE_LOGITS}")
    logprobs_N, *entropy_N = _whole(output_1NK)[0].unbind(-1)
    return logprobs_N, entropy_N[0] if with_entropy else None


def _is_linear(head: torch.nn.Module) -> bool:
    """Whether the head is a matrix product and nothing else: not quantized, normalized or with an adapter."""
    return getattr(head.forward, "__func__", None) in (torch.nn.Linear.forward, TPLinear.forward)


def _changes_logits(config: Any) -> bool:
    text_config = config.get_text_config()
    settings = [getattr(where, name, None) for where in (config, text_config) for name in _CHANGE_LOGITS]
    return any(value is not None and value != 1.0 for value in settings)


def _action_positions(hidden: Tensor, predicts_action_BT: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Hidden states of the action positions [N, H]; and what makes a result the kind of tensor that `hidden` is."""
    if isinstance(hidden, DTensor):  # tensor parallel: all ranks of its mesh have all positions
        mesh = hidden.device_mesh
        local = hidden.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
        return _action_positions(local, predicts_action_BT)[0], lambda t: DTensor.from_local(t, mesh, run_check=False)
    return hidden.flatten(0, -2)[predicts_action_BT.flatten()], lambda tensor: tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _is_same(output: Tensor, given: Tensor) -> bool:
    return output is given or torch.allclose(_whole(output), _whole(given), rtol=0.0, atol=0.0, equal_nan=True)


@contextlib.contextmanager
def _forward_replaced(module: torch.nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """`module` runs `forward`, between its own hooks."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
