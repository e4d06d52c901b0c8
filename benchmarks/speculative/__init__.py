"""Parts of the benchmark of speculative decoding."""
