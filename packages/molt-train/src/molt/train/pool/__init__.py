"""Stage 1, lease: tasks, leases, groups, and the ledger that survives the process."""
