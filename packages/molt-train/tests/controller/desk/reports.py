"""What a worker sends."""

from molt.agents.protocol import LeaseRequest, ResultReport

ASK = LeaseRequest(worker_id="w", capacity=8, wait_s=0.0)
PATIENT = LeaseRequest(worker_id="w", capacity=1, wait_s=30.0)


def done(reward=1.0, *, attempt=1, outcome="completed", worker_id="w", **fields):
    """A report."""
    return ResultReport(worker_id=worker_id, attempt=attempt, outcome=outcome, reward=reward, **fields)
