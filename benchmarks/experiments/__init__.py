"""The experiments that started this field, repeated on this system: `make experiments`, docs/experiments.md."""
