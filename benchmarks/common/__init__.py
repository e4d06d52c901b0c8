"""The benchmarks' common parts: rows, other load, workloads, checkpoints, and the measured systems."""
