"""What the replies of Chat Completions and Completions share: token counts, log-probs, signs of life."""

from collections.abc import Sequence
from typing import Any

from molt.train.gateway.call import Reply

KEEPALIVE = b": keep-alive\n\n"
_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no number for: of a token that top-p or a grammar rules out."""


def usage(replies: Sequence[Reply], *, num_choices: int) -> dict[str, Any]:
    """Tokens of all choices; each prompt, shared by `num_choices` replies in a row, is counted once."""
    num_prompt = num_cached = num_sampled = num_reasoning = 0
    for index, reply in enumerate(replies):
        num_sampled += len(reply.token_ids)
        num_reasoning += reply.reasoning_tokens
        if index % num_choices == 0:
            num_prompt += reply.prompt_tokens
            num_cached += reply.cached_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }


def finite(logprob: float) -> float:
    """A log-prob as JSON can carry it."""
    return max(logprob, _LOWEST_LOGPROB)
