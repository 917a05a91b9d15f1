"""Latency models from measured steps: this machine's, and profiles that others published."""
