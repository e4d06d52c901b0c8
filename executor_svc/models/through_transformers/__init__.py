"""Models that Cadenza has no code of its own for: transformers' code, with attention over our paged KV cache."""
