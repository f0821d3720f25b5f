"""What the gateway measures of the calls of each wire."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import get_args

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from molt.train.gateway.call import Reply
from molt.train.observe.metrics import SECONDS, Metrics
from molt.train.records.turn import Wire

_LABELS = ("wire",)
_BOUNDS = [floatToGoString(bound) for bound in (*SECONDS, float("inf"))]


class Meters:
    """Counts the calls in plain numbers, which become metrics when they are asked for: a call has no time for locks."""

    def __init__(self, metrics: Metrics) -> None:
        wires: tuple[Wire, ...] = get_args(Wire)
        self._calls = {wire: _Calls() for wire in wires}
        metrics.collect_from(self)

    def answered(self, wire: Wire, *, seconds: float, replies: Sequence[Reply]) -> None:
        """Count a call that an engine answered."""
        calls = self._calls[wire]
        calls.within[bisect_left(SECONDS, seconds)] += 1
        calls.seconds += seconds
        for reply in replies:
            calls.sampled += len(reply.token_ids)
            calls.prompt += reply.prompt_tokens
            calls.cached += reply.cached_tokens

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client.registry.Collector`."""
        seconds = HistogramMetricFamily("molt_gateway_call_seconds", "Time to answer a model call", labels=_LABELS)
        sampled = CounterMetricFamily("molt_gateway_sampled_tokens", "Tokens sampled for clients", labels=_LABELS)
        prompt = CounterMetricFamily("molt_gateway_prompt_tokens", "Prompt tokens given to engines", labels=_LABELS)
        cached = CounterMetricFamily(
            "molt_gateway_cached_tokens", "Prompt tokens that engines had in their prefix cache", labels=_LABELS
        )
        for wire, calls in self._calls.items():
            buckets = list(zip(_BOUNDS, accumulate(calls.within), strict=True))
            seconds.add_metric([wire], buckets=buckets, sum_value=calls.seconds)
            sampled.add_metric([wire], calls.sampled)
            prompt.add_metric([wire], calls.prompt)
            cached.add_metric([wire], calls.cached)
        return (seconds, sampled, prompt, cached)


class _Calls:
    """The calls of one wire."""

    def __init__(self) -> None:
        self.within = [0] * len(_BOUNDS)
        """Calls that took longer than the bound before, and no longer than this."""
        self.seconds = 0.0
        self.sampled = self.prompt = self.cached = 0
