"""Benchmarks: each is a module that prints one JSON line, comparing what it measures in one run."""
