"""Drivers of other systems, each run by its own interpreter."""
