"""The experiments that started this field, made again on this system: `make experiments`, docs/experiments.md."""
