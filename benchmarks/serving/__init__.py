"""The parts of `cpu_serving`: the systems, their start, the runs, and the rows."""
