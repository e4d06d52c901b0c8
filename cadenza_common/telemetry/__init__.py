"""Logs and traces of the services, and the trace context of the client's calls; see docs/tracing.md."""
