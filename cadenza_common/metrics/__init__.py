"""Prometheus metrics of both services: plain numbers that are cheap to update, and a server that exports them."""
