"""The rollout desk: what stands behind the control API. It gives leases sessions, and makes rollouts of their results.

    lease    pool's assignment --> gateway session --> Lease
    report   session's turns --> trajectory --> experiences --> Rollout --> pool

| file | has |
|---|---|
| `desk.py` | what the server calls, and what happens by itself as time passes |
| `leases.py` | leases of workers |
| `self_driven.py` | sessions that no worker drives |
| `sessions.py` | both kinds of sessions, from opening until their recordings are in the ledger |
| `settings.py` | what leases and sessions are given |
"""

from molt.train.controller.desk.desk import RolloutDesk
from molt.train.controller.desk.settings import DeskSettings

__all__ = ["DeskSettings", "RolloutDesk"]
