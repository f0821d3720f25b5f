"""Frozen records, one module a stage: what the stages hand to each other.

They import nothing of ours but the SDK's protocol, and every per-token list says what it is aligned with.
"""
