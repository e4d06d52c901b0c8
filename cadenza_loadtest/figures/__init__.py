"""Figures of load tests and experiments: matplotlib's objects (no pyplot, no display), in one style.

Each function takes plain sequences or the run's columns and returns a `Figure`; `style` saves it. A panel without
data holds a sentence that says so.
"""
