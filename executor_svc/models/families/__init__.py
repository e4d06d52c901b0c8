"""Readers of config.json, a file for each family of checkpoints: each returns the `DecoderSpec` that it describes."""
