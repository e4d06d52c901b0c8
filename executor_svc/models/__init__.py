"""Model architectures, built from layers; `registry` says which ones there are."""
