"""Seeds that differ from run to run, for tests that look for what no fixed seed shows. For tests only."""

from __future__ import annotations

import os
import random

VARIABLE = "CADENZA_TEST_SEED"


def fresh_seed() -> int:
    """A new seed, or the one that the environment gives; printed, for pytest shows that of a test that fails."""
    given = os.environ.get(VARIABLE)
    seed = int(given) if given else random.SystemRandom().getrandbits(32)
    print(f"{VARIABLE}={seed} repeats this")
    return seed
