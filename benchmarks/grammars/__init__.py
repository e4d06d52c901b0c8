"""Parts of `structured`."""
