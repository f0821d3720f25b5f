"""Prometheus metrics in a registry of their own, so that two servers in one process do not share counts."""

from collections.abc import Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""The media type of `Metrics.render`."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds of histograms that cover a cached model call as well as a long rollout."""

_Metric = TypeVar("_Metric", Counter, Gauge)


class Metrics:
    """The metrics of one server. A metric is made at its first mention; every later mention must agree with it.

        requests = metrics.counter("gateway_requests", "Model calls", labels=("wire",))
        requests.labels(wire="chat").inc()

    Names get the prefix `molt_`, and counters the suffix `_total`.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._metrics: dict[str, tuple[Counter | Gauge, tuple[str, ...]]] = {}

    def counter(self, name: str, description: str, *, labels: Sequence[str] = ()) -> Counter:
        """A count that only grows."""
        return self._get(Counter, name, tuple(labels)) or self._add(
            Counter(name, description, labels, namespace="molt", registry=self._registry), name, labels
        )

    def gauge(self, name: str, description: str, *, labels: Sequence[str] = ()) -> Gauge:
        """A value that goes up and down."""
        return self._get(Gauge, name, tuple(labels)) or self._add(
            Gauge(name, description, labels, namespace="molt", registry=self._registry), name, labels
        )

    def collect_from(self, collector: Collector) -> None:
        """Show what `collector` counts in its own way, under full names."""
        self._registry.register(collector)

    def render(self) -> bytes:
        """Everything in the Prometheus text format."""
        return generate_latest(self._registry)

    def _get(self, kind: type[_Metric], name: str, labels: tuple[str, ...]) -> _Metric | None:
        if name not in self._metrics:
            return None
        metric, known_labels = self._metrics[name]
        if not isinstance(metric, kind) or known_labels != labels:
            raise ValueError(
                f"metric {name!r} exists as a {type(metric).__name__} with labels {known_labels}; "
                f"it cannot also be a {kind.__name__} with labels {labels}"
            )
        return metric

    def _add(self, metric: _Metric, name: str, labels: Sequence[str]) -> _Metric:
        self._metrics[name] = (metric, tuple(labels))
        return metric
