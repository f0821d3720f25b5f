"""Rows of a microbatch as tensors: one below the other and padded, or end to end in one packed row."""

# Shapes: B rows of the tensors (1 when packed), T tokens of a row of the tensors, N action tokens of all rows.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from molt.train.records.experience import Payload
from molt.train.records.window import Row

INERT = Payload(
    token_ids=np.zeros(2, np.int32),
    action_mask=np.zeros(2, bool),
    logprobs=np.zeros(2, np.float32),
    versions=np.full(2, -1, np.int32),
)
"""Stands in for the rows of an empty microbatch: every rank runs the same collectives."""


@dataclass(frozen=True)
class Batch:
    """A microbatch on the device. The action axis runs row by row, token by token, whatever the layout."""

    input_ids_BT: torch.Tensor
    attention_mask_BT: torch.Tensor
    """Padded: int64 [B, T], 1 at tokens. Packed: bool [1, 1, T, T], True where the token of the third axis may attend
    to that of the fourth, which is in the same row and not after it."""
    position_ids_BT: torch.Tensor
    """Position in the row, from 0."""
    predicts_action_BT: torch.Tensor
    """True at position t when token t+1 is an action of the same row: where the logits that sampled it are."""
    targets_N: torch.Tensor
    behaviour_N: torch.Tensor
    """Recorded log-probs."""
    advantages_N: torch.Tensor
    weights_N: torch.Tensor
    """What each token counts in the window's loss."""
    rollout_N: torch.Tensor
    """Number of the token's rollout in the window."""
    sequence_N: torch.Tensor
    """Number of the token's row in the microbatch, below `num_sequences`."""
    num_sequences: int
    """Rows, the inert one not counted."""
    reference_N: torch.Tensor | None
    """Log-probs under the reference policy; None where the window has none. Empty, as all else, without rows."""
    values_N: torch.Tensor | None
    returns_N: torch.Tensor | None
    rollout_ids: tuple[str, ...]
    """One a row."""


def collate(rows: Sequence[tuple[Payload, Row]], *, device: torch.device, layout: Literal["padded", "packed"]) -> Batch:
    """Make one batch of rows; no row gives one inert row.

    What a payload holds in slots that are no actions, NaN included, reaches no tensor but the token ids.

    Args:
        rows: Token rows with what belongs to their action tokens.
        device: Where the tensors go.
        layout: `padded` pads to the longest; `packed` needs a model that takes a mask [1, 1, T, T] and has no state
            besides attention that runs along a row, such as a convolution or linear attention.

    Raises:
        ValueError: A row starts with an action, which nothing predicts, or lacks what others have, or does not have a
            number for each action.
    """
    for payload, row in rows:
        _check(payload, row)
    payloads = [payload for payload, _ in rows] or [INERT]
    arrange = _packed if layout == "packed" else _padded
    ids_BT, position_ids_BT, actions_BT, attention = arrange(payloads, device)
    predicts_BT = torch.zeros_like(actions_BT)
    predicts_BT[:, :-1] = actions_BT[:, 1:]  # a first token is no action: the last of a row predicts nothing
    counts = torch.tensor([len(row.advantages) for _, row in rows], dtype=torch.int64, device=device)

    def each(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        """One value a row -> at each of its actions."""
        return torch.tensor(values, dtype=dtype, device=device).repeat_interleave(counts)

    def joined(values: Sequence[np.ndarray]) -> torch.Tensor:
        joined_N = np.concatenate(values) if values else np.zeros(0)
        return torch.from_numpy(joined_N.astype(np.float32)).to(device)

    def optional(values: Sequence[np.ndarray | None]) -> torch.Tensor | None:
        given = [value for value in values if value is not None]
        if given and len(given) < len(values):
            raise ValueError(f"of {len(values)} rows only {len(given)} have reference log-probs, values or returns")
        return joined(given) if given or not values else None

    return Batch(
        input_ids_BT=ids_BT,
        attention_mask_BT=attention,
        position_ids_BT=position_ids_BT,
        predicts_action_BT=predicts_BT,
        targets_N=ids_BT[actions_BT],
        behaviour_N=joined([payload.logprobs[payload.action_mask] for payload, _ in rows]),
        advantages_N=joined([row.advantages for _, row in rows]),
        weights_N=each([row.weight for _, row in rows], torch.float32),
        rollout_N=each([row.rollout for _, row in rows], torch.int64),
        sequence_N=each(range(len(rows)), torch.int64),
        num_sequences=len(rows),
        reference_N=optional([row.reference for _, row in rows]),
        values_N=optional([row.values for _, row in rows]),
        returns_N=optional([row.returns for _, row in rows]),
        rollout_ids=tuple(row.experience.rollout_id for _, row in rows),
    )


_Arranged = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Token ids, position ids, action mask: [B, T] each; attention mask."""


def _padded(payloads: Sequence[Payload], device: torch.device) -> _Arranged:
    shape = len(payloads), max(len(payload.token_ids) for payload in payloads)
    ids, attention, actions = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, bool)
    for i, payload in enumerate(payloads):
        length = len(payload.token_ids)
        ids[i, :length] = payload.token_ids
        attention[i, :length] = 1
        actions[i, :length] = payload.action_mask
    positions_BT = torch.arange(shape[1], device=device).expand(shape)
    return _on(device, ids), positions_BT, _on(device, actions), _on(device, attention)


def _packed(payloads: Sequence[Payload], device: torch.device) -> _Arranged:
    lengths = [len(payload.token_ids) for payload in payloads]
    ids = np.concatenate([payload.token_ids for payload in payloads]).astype(np.int64)
    actions = np.concatenate([payload.action_mask for payload in payloads])
    positions = np.concatenate([np.arange(length) for length in lengths])
    row_T = _on(device, np.repeat(np.arange(len(lengths)), lengths))
    attention_TT = (row_T[:, None] == row_T[None, :]).tril_()
    return _on(device, ids[None]), _on(device, positions[None]), _on(device, actions[None]), attention_TT[None, None]


def _on(device: torch.device, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


def _check(payload: Payload, row: Row) -> None:
    name, num_actions = row.experience.segment_id, int(payload.action_mask.sum())
    if payload.action_mask[0]:
        raise ValueError(f"segment {name!r} starts with an action, which no token predicts")
    for field in ("advantages", "reference", "values", "returns"):
        values = getattr(row, field)
        if values is not None and len(values) != num_actions:
            raise ValueError(f"segment {name!r} has {num_actions} actions and {len(values)} {field}")
