"""Reads options, for both services and for the programs that start them: one set of names, sources and messages.

Arguments override environment variables, these override a TOML file, which overrides the defaults. This package is not
part of the client: it needs pydantic-settings, which comes with the services (docs/decisions/0005-shared-settings.md).
"""
