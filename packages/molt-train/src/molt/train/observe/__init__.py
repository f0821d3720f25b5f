"""What a run shows of itself: Prometheus metrics, the journal of updates, logs, the live view and the reward picture."""
