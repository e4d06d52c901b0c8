"""How options are read, by both services and by what starts them: one set of names, sources and messages.

Arguments go before environment variables, these before a TOML file, that before defaults. Not part of the client: it
needs pydantic-settings, which comes with the services (docs/decisions/0005-shared-settings.md).
"""
