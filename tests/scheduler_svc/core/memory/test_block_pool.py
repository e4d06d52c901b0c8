"""The block pool's own proof that every block is accounted for can fail."""

from __future__ import annotations

import pytest

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.memory.block_pool import BlockPool


@pytest.mark.parametrize("offset", [-1, 1])
def test_a_wrong_number_of_shared_references_is_found(offset: int) -> None:
    pool = BlockPool(4)
    (block,) = pool.take(1)
    pool.share(block)
    pool.check_integrity({block: 2})
    pool.num_shared_refs += offset
    with pytest.raises(InvariantError, match="shared references"):
        pool.check_integrity({block: 2})
