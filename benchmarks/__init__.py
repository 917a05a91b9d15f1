"""Benchmarks: commands that write JSON with every sample. Not installed, not part of the tests."""
