"""`python -m cadenza`: the `cadenza` command if its script is not on the path."""

from __future__ import annotations

from cadenza.cli import main

if __name__ == "__main__":
    main()
