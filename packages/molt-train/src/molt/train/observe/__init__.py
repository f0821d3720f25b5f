"""What a run shows of itself: metrics, the journal of updates, logs, the live view and the reward picture."""
