"""Starts the services and keeps them alive: `LLM`, `LocalServices`, child processes, Ray."""
