"""Benchmarks: one file per question, rows in results/. `python -m benchmarks --list` lists them."""
