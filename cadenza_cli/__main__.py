"""`python -m cadenza_cli`: the `cadenza` command, where its script is not on the path."""

from cadenza_cli import main

if __name__ == "__main__":
    main()
