"""What the benchmarks share: rows, other load, workloads, checkpoints, and the systems that are measured."""
