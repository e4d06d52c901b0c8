"""What is run on a machine with a GPU: tests, kernels beside the hardware's limits, serving beside a peer."""
