"""Metrics: one registry a server, one meaning a name."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from molt.train.observe.metrics import Metrics


def samples(metrics):
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_counters_and_gauges_are_rendered_with_help():
    metrics = Metrics()
    metrics.counter("turns", "Model calls recorded", labels=("wire",)).labels(wire="chat").inc(3)
    metrics.gauge("queue_groups", "Complete groups that wait").set(2)
    values = samples(metrics)
    assert values["molt_turns_total", (("wire", "chat"),)] == 3
    assert values["molt_queue_groups", ()] == 2
    assert b"# HELP molt_turns_total Model calls recorded\n" in metrics.render()


def test_a_second_mention_is_the_same_metric():
    metrics = Metrics()
    metrics.counter("turns", "Model calls").inc()
    metrics.counter("turns", "Model calls").inc()
    assert samples(metrics)["molt_turns_total", ()] == 2


@pytest.mark.parametrize("change", [{"labels": ("wire",)}, {"kind": "gauge"}])
def test_a_name_cannot_mean_two_things(change):
    metrics = Metrics()
    metrics.counter("turns", "Model calls")
    with pytest.raises(ValueError, match="metric 'turns' exists as a Counter with labels"):
        getattr(metrics, change.get("kind", "counter"))("turns", "Model calls", labels=change.get("labels", ()))


def test_two_servers_in_one_process_do_not_share_counts():
    one, other = Metrics(), Metrics()
    one.counter("turns", "Model calls").inc()
    other.counter("turns", "Model calls")
    assert samples(one)["molt_turns_total", ()] == 1
    assert samples(other)["molt_turns_total", ()] == 0
