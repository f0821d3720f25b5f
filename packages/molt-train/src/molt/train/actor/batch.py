"""Rows of a microbatch as padded tensors."""

# Shapes: B rows, T tokens of the longest row, N action tokens of all rows.

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from molt.train.records.experience import Payload


@dataclass(frozen=True)
class Batch:
    """A microbatch on the device. The action axis runs row by row, token by token."""

    input_ids_BT: torch.Tensor
    attention_mask_BT: torch.Tensor
    predicts_action_BT: torch.Tensor
    """True at position t when token t+1 is an action: where the logits that sampled it are."""
    targets_N: torch.Tensor
    behaviour_N: torch.Tensor
    """Recorded log-probs."""
    advantages_N: torch.Tensor


def collate(rows: Sequence[tuple[Payload, np.ndarray]], *, device: torch.device) -> Batch:
    """Pad rows of (payload, advantages of its action tokens) to one batch; no row gives one inert row."""
    num_rows, width = max(len(rows), 1), max((len(p.token_ids) for p, _ in rows), default=2)
    ids = np.zeros((num_rows, width), np.int64)
    attention = np.zeros((num_rows, width), np.int64)
    actions = np.zeros((num_rows, width), bool)
    behaviour = np.zeros((num_rows, width), np.float32)
    attention[:, :1] = 1  # an inert row still attends to something
    for i, (payload, _) in enumerate(rows):
        length = len(payload.token_ids)
        ids[i, :length] = payload.token_ids
        attention[i, :length] = 1
        actions[i, :length] = payload.action_mask
        behaviour[i, :length] = payload.logprobs
    advantages = np.concatenate([a for _, a in rows]) if rows else np.zeros(0, np.float32)
    predicts = np.zeros_like(actions)
    predicts[:, :-1] = actions[:, 1:]
    return Batch(
        input_ids_BT=torch.from_numpy(ids).to(device),
        attention_mask_BT=torch.from_numpy(attention).to(device),
        predicts_action_BT=torch.from_numpy(predicts).to(device),
        targets_N=torch.from_numpy(ids[actions]).to(device),
        behaviour_N=torch.from_numpy(behaviour[actions]).to(device),
        advantages_N=torch.from_numpy(advantages.astype(np.float32)).to(device),
    )
