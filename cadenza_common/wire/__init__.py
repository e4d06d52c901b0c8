"""Addresses, channels and TLS of every Cadenza process."""
