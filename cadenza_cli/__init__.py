"""The `cadenza` command."""

from __future__ import annotations

import os
import sys

# grpc logs each failed TLS handshake, which the command reports in its own words; it reads this variable on import.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def main() -> None:
    """Entry point of the console script; exits with the command's code."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except ImportError as error:
        from cadenza_common.settings.extras import install_command

        sys.stderr.write(f"cadenza: the command line needs {error.name}: {install_command('cli')}\n")
        raise SystemExit(1) from None
    try:
        from cadenza_cli.app import run
    except KeyboardInterrupt:  # Ctrl-C before the command has begun
        raise SystemExit(130) from None
    raise SystemExit(run())
