"""Machine code for the CPU, made at start: kernels are written with `emit`, compiled by `compiled`, run by `team`."""
