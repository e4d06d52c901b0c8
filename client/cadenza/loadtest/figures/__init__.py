"""Figures of load tests and experiments: matplotlib's objects (no pyplot, no display), in one style.

Each function takes plain sequences or the run's columns and returns a `Figure`; `saving` writes it. With nothing to
show, a panel holds a sentence that says so.
"""
