"""Whether a model fits into this machine, from the headers of its files alone. Needs no torch."""
