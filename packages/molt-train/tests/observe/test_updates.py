from molt.train.observe.metrics import Metrics
from molt.train.observe.updates import UpdateMetrics


def row(step, seconds):
    return {
        "step": step,
        "reward_mean": 0.25 * step,
        "loss": -0.5,
        "grad_norm": 2.0,
        "logprob_gap_max": 1e-6,
        "prefix_hit_rate": 0.75,
        "staleness_mean": 0.5,
        "staleness_max": 1,
        "num_rollouts": 8,
        "num_action_tokens": 100,
        "timing": {"train": seconds, "refit": 0.5, "total": seconds + 0.5},
    }


def test_gauges_are_of_the_last_update_and_counters_of_all():
    metrics = Metrics()
    updates = UpdateMetrics(metrics)
    updates.update(row(1, seconds=1.0))
    updates.update(row(2, seconds=3.0))
    lines = metrics.render().decode().splitlines()
    assert "molt_policy_version 2.0" in lines
    assert "molt_update_reward_mean 0.5" in lines
    assert "molt_update_staleness_max 1.0" in lines
    assert "molt_update_prefix_hit_rate 0.75" in lines
    assert "molt_trained_rollouts_total 16.0" in lines
    assert "molt_trained_tokens_total 200.0" in lines
    assert 'molt_update_seconds_total{part="train"} 4.0' in lines
    assert 'molt_update_seconds_total{part="refit"} 1.0' in lines
    assert not [line for line in lines if 'part="total"' in line]
