"""The parts of `cpu_serving`: the systems, how they are opened, the runs, and the rows."""
