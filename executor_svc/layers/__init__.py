"""Parts of a transformer, the same on every device: they hold weights and call the device's kernels."""
