"""Log-probs of given tokens under given logits. T positions, V vocabulary, C positions of a chunk."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def gather_logprobs(
    logits_TV: Tensor, targets_T: Tensor, temperature: float, *, chunk_size: int | None = None
) -> Tensor:
    """The value of log softmax(logits / temperature) at the target of each position, in float32 or wider.

    The temperature divides the logits, as the sampler's did; dividing the log-probs would be another distribution.

    Args:
        logits_TV: Logits that predict the targets: row j belongs to the token before target j. Select action positions
            first; the others cost memory and give nothing.
        targets_T: int64, the sampled tokens.
        temperature: That of sampling, above 0.
        chunk_size: Positions whose wide copies exist at a time; the backward pass computes them again. None: all.

    Returns:
        [T], float32, or float64 for float64 logits.
    """
    if chunk_size is None or len(targets_T) <= chunk_size:
        return _gather(logits_TV, targets_T, temperature)
    chunks = zip(logits_TV.split(chunk_size), targets_T.split(chunk_size), strict=True)
    parts = [checkpoint(_gather, logits, targets, temperature, use_reentrant=False) for logits, targets in chunks]
    return torch.cat(parts)


def _gather(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> Tensor:
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)) / temperature
    return wide_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1) - wide_CV.logsumexp(-1)
