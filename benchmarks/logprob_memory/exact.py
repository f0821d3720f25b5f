"""What the variants should give, in float64 and by the formula, on a slice of the tokens and one of the vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.logprob_memory.variant import TEMPERATURE, Inputs

NUM_CHECKED = 256
CHUNK = 64


@dataclass(frozen=True)
class Exact:
    """Log-probs and gradients of the first `NUM_CHECKED` tokens; the weight's gradient at their targets."""

    logprobs: Tensor
    hidden_gradient: Tensor
    columns: Tensor
    weight_gradient: Tensor


def exact(inputs: Inputs) -> Exact:
    """One pass over all tokens, since each of them adds to the gradient of every column of the weight."""
    weight, columns = inputs.weight.double(), inputs.targets[:NUM_CHECKED].unique()
    weight_gradient, logprobs, hidden_gradients = torch.zeros_like(weight[columns]), [], []
    for i in range(0, len(inputs.targets), CHUNK):
        hidden, targets = inputs.hidden[i : i + CHUNK].double(), inputs.targets[i : i + CHUNK].unsqueeze(-1)
        scale = inputs.advantages[i : i + CHUNK].double().unsqueeze(-1) / TEMPERATURE
        all_logprobs = functional.linear(hidden, weight).div_(TEMPERATURE)
        all_logprobs -= all_logprobs.logsumexp(-1, keepdim=True)
        weight_gradient += (((targets == columns).double() - all_logprobs[:, columns].exp()) * scale).T @ hidden
        if i < NUM_CHECKED:
            logprobs.append(all_logprobs.gather(-1, targets).squeeze(-1))
            hidden_gradients.append((weight[targets.squeeze(-1)] - all_logprobs.exp() @ weight) * scale)
    return Exact(torch.cat(logprobs), torch.cat(hidden_gradients), columns, weight_gradient)
