"""Drivers of other systems, each run by an interpreter of its own."""
