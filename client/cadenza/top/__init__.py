"""`cadenza top`: a running server's figures, interval by interval."""
