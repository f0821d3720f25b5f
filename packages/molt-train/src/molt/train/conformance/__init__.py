"""`molt-train conformance`: real clients and agents, unmodified, against the gateway on the scripted engine.

Each of them does one task of two tool calls. It passes when the outcome is right and the recording is exact: what the
engine was given and gave, all of it delivered, in one row that would be trained.
"""

from molt.train.conformance.matrix import run_conformance
from molt.train.conformance.table import Row, format_table

__all__ = ["Row", "format_table", "run_conformance"]
