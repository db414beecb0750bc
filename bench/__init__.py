"""Benchmarks: what HyMCache costs beside plain copies and beside its peers, and the demo."""
