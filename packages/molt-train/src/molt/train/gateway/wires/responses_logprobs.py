"""OpenAI Responses: the log-probs of the tokens that a message's text is made of."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from molt.train.gateway.call import TopLogprobs
from molt.train.gateway.wires.openai_reply import finite

_PART = "\ufffd"


class TextLogprobs:
    """The tokens of one reply, and which of them are its text."""

    def __init__(self, token_text: Callable[[int], str]) -> None:
        self._token_text = token_text
        self._entries: list[dict[str, Any]] = []
        self._num_taken = 0

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], top_logprobs: Sequence[TopLogprobs]) -> None:
        """Take newly sampled tokens; `top_logprobs` has one list a token, or is empty."""
        tops = top_logprobs or [[]] * len(token_ids)
        for token_id, logprob, top in zip(token_ids, logprobs, tops, strict=True):
            others = [self._entry(*other) for other in top]
            self._entries.append(self._entry(token_id, logprob) | {"top_logprobs": others})

    def take(self) -> list[dict[str, Any]]:
        """The tokens since the last call: those of a delta, as closely as they come."""
        taken, self._num_taken = self._entries[self._num_taken :], len(self._entries)
        return taken

    def of(self, reasoning: str, content: str) -> list[dict[str, Any]]:
        """The tokens of `content`, which was sampled behind `reasoning`.

        The text of a token that is a part of a character says nothing: such tokens belong to the text around them.
        """
        texts = [entry["token"].replace(_PART, "") for entry in self._entries]
        sampled, ends = "".join(texts), list(accumulate(map(len, texts)))
        known = set(sampled)
        behind = self._behind(_only(known, reasoning), sampled, ends)
        content = _only(known, content)
        found = sampled.find(content, ends[behind - 1] if behind else 0)
        if found < 0:
            return []
        if content:
            first, end = bisect_right(ends, found), bisect_left(ends, found + len(content)) + 1
        else:
            first = end = next((index for index in range(behind, len(texts)) if not texts[index]), len(texts))
        while first > behind and not texts[first - 1]:
            first -= 1
        while end < len(texts) and not texts[end]:
            end += 1
        return self._entries[first:end]

    def _behind(self, reasoning: str, sampled: str, ends: list[int]) -> int:
        """Index of the first token behind the reasoning and the mark that closes it."""
        if not reasoning:
            return 0
        index = bisect_right(ends, max(0, sampled.find(reasoning)) + len(reasoning))
        while index < len(ends) and not self._entries[index]["token"].strip():
            index += 1
        return min(index + 1, len(ends))

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token_id)
        return {"token": text, "bytes": list(text.encode()), "logprob": finite(logprob)}


def _only(known: set[str], text: str) -> str:
    return "".join([char for char in text if char in known])
