"""Wire to core and back, nothing else: generation (clients), execution (executors), admin (operators), errors."""
