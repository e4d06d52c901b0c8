"""Ids and logits of a smaller vocabulary by those of the target."""

from __future__ import annotations

import pytest
import torch

from executor_svc.gpu.kernels.sampling.draft_vocabulary import spread, to_target


@pytest.mark.parametrize(("vocab", "own"), [(1500, 1100), (131, 50), (20, 1)])
def test_ids_and_logits_by_the_targets_ids(device: torch.device, vocab: int, own: int) -> None:
    generator = torch.Generator().manual_seed(own)
    target_ids = torch.randperm(vocab, generator=generator)[:own].sort().values
    logits, ids = torch.randn(3, own, generator=generator), torch.tensor([0, -1, own - 1])
    expected_ids = [int(target_ids[0]), -1, int(target_ids[-1])]
    expected = torch.full((3, vocab), float("-inf")).index_copy_(1, target_ids, logits)
    ids, target_ids = ids.to(device), target_ids.to(device)
    to_target(ids, target_ids)
    assert ids.tolist() == expected_ids
    wide = torch.full((4, vocab), float("-inf"), device=device)
    for drawn in (torch.randn(3, own, generator=generator), logits):  # what is there is written over
        spread(drawn.to(device), target_ids, wide[:3])
    assert torch.equal(wide[:3].cpu(), expected)
    assert bool(wide[3].isneginf().all())


def test_wrong_arguments_are_named(device: torch.device) -> None:
    logits, ids = torch.zeros(2, 3, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    wide = torch.zeros(2, 5, device=device)
    for message, wrong in (
        ("ids must be contiguous", lambda: to_target(ids.int(), ids)),
        ("target_ids must be contiguous", lambda: to_target(ids, ids.int())),
        ("target_ids must be contiguous", lambda: spread(logits, ids[:2], wide)),
        (r"wide is \[1, 5\], too small", lambda: spread(logits, ids, wide[:1])),
        (r"wide is \[2, 2\], too small", lambda: spread(logits, ids, wide[:, :2])),
        ("logits must be a matrix", lambda: spread(logits.half(), ids, wide)),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
