"""Sampling seeds that say the same in every run: each is made of what it is for."""

import hashlib


def seed_of(*parts: int | str) -> int:
    """63 bits that depend on every part and on their order. Not Python's `hash`, which differs between processes."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1
