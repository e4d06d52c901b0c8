"""Parts of the benchmark of LoRA adapters."""
