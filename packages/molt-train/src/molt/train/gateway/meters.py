"""What the gateway measures of the calls of each wire."""

from collections.abc import Sequence
from typing import get_args

from molt.train.gateway.call import Reply
from molt.train.observe.metrics import Metrics
from molt.train.records.turn import Wire


class Meters:
    """The series of every wire, looked up once: finding one by its label costs as much as ten additions to it."""

    def __init__(self, metrics: Metrics) -> None:
        seconds = metrics.histogram("gateway_call_seconds", "Time to answer a model call", labels=("wire",))
        sampled = metrics.counter("gateway_sampled_tokens", "Tokens sampled for clients", labels=("wire",))
        prompt = metrics.counter("gateway_prompt_tokens", "Prompt tokens given to engines", labels=("wire",))
        cached = metrics.counter(
            "gateway_cached_tokens", "Prompt tokens that engines had in their prefix cache", labels=("wire",)
        )
        wires: tuple[Wire, ...] = get_args(Wire)
        self._seconds = {wire: seconds.labels(wire) for wire in wires}
        self._tokens = {wire: (sampled.labels(wire), prompt.labels(wire), cached.labels(wire)) for wire in wires}

    def answered(self, wire: Wire, *, seconds: float, replies: Sequence[Reply]) -> None:
        """Count a call that an engine answered."""
        self._seconds[wire].observe(seconds)
        sampled, prompt, cached = self._tokens[wire]
        for reply in replies:
            sampled.inc(len(reply.token_ids))
            prompt.inc(reply.prompt_tokens)
            if reply.cached_tokens:
                cached.inc(reply.cached_tokens)
