"""What the machine allows: its measured rates, the work of a step, and the kernels' steps held against both."""
