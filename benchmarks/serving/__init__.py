"""The parts of the benchmarks on the CPU: systems and their start, runs, rows, limits of the machine, drafts."""
