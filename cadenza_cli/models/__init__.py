"""Commands about models: which are here, which fit, which run."""
