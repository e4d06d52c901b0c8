"""Tables of a step's rows by adapter beside a sort by numpy, at edges of tiles, with poison in what is not read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor_svc.gpu.kernels.lora.tables import (
    FEW_ROWS,
    MAX_PLACES,
    RowTable,
    num_tiles,
    sort_rows,
    sort_tokens,
    tile_rows,
)
from executor_svc.gpu.kernels.slots.slots import QUERY_START_LOC, SEQ_LENS, SEQ_SLOTS, StepBuffers, StepSizes
from tests.executor_svc.gpu.kernels.lora.cases import ints

POISON = -(2**31)


def poisoned(max_rows: int, max_loras: int, device: torch.device) -> RowTable:
    table = RowTable.empty(max_rows, max_loras, device)
    table.rows.fill_(POISON)
    table.tiles[:, :3].fill_(POISON)
    return table


def check_table(table: RowTable, places: np.ndarray) -> None:
    """Against the places [R] of the rows, -1 for none."""
    order = np.argsort(places, kind="stable")
    order = order[places[order] >= 0]
    assert table.rows[: len(order)].tolist() == order.tolist()
    assert (table.rows[len(order) :] == POISON).all()
    size, most = tile_rows(len(places)), num_tiles(len(places), table.max_loras)
    wanted = []
    for place in np.unique(places[order]).tolist():
        first, count = int(np.sum(places[order] < place)), int(np.sum(places == place))
        wanted += [[place, first + at, min(size, count - at), 0] for at in range(0, count, size)]
    assert len(wanted) <= most
    assert table.tiles[:most].tolist() == wanted + [[0] * 4] * (most - len(wanted))
    assert (table.tiles[most:, :3] == POISON).all()


def check_tokens(
    seqs: list[tuple[int, int, bool]], padding: tuple[int, int], max_loras: int, device: torch.device
) -> None:
    """Sequences of (place, tokens, live), sequence i in slot 2 i + 1; padding: tokens and sequences more."""
    counts = [count for _, count, _ in seqs]
    sizes = StepSizes(sum(counts) + padding[0], len(seqs) + padding[1], 0, 0)
    buffers = StepBuffers.empty(sizes, 1, device)
    buffers.by_seq.fill_(POISON)
    slot_places = torch.full((2 * len(seqs) + 1,), POISON, dtype=torch.int32, device=device)
    slot_places[1::2] = ints([place for place, _, _ in seqs], device)
    owned = [int(i < padding[0]) for i in range(padding[1])]
    buffers.by_seq[QUERY_START_LOC.value, : sizes.num_seqs + 1] = ints(np.cumsum([0, *counts, *owned]), device)
    buffers.by_seq[SEQ_SLOTS.value, : sizes.num_seqs] = ints([*range(1, 2 * len(seqs), 2), *[-1] * padding[1]], device)
    buffers.by_seq[SEQ_LENS.value, : sizes.num_seqs] = ints(
        [(count + 5) * live for _, count, live in seqs] + [0] * padding[1], device
    )
    token_places = torch.full((sizes.num_tokens + 2,), POISON, dtype=torch.int32, device=device)
    table = poisoned(sizes.num_tokens + 1, max_loras, device)
    sort_tokens(buffers, sizes, slot_places, token_places, table)

    places = np.repeat([place if live else -1 for place, _, live in seqs], counts).astype(np.int64)
    places = np.concatenate((places, np.full(padding[0], -1)))
    assert token_places.tolist() == [*places.tolist(), POISON, POISON]
    check_table(table, places)

    last = torch.from_numpy(np.cumsum(counts) - 1)[torch.randperm(len(seqs))]
    tokens = torch.cat((last, torch.tensor([-1, 0]))).to(device)
    logits = poisoned(len(tokens) + 3, max_loras, device)
    sort_rows(token_places, tokens, logits)
    check_table(logits, np.append(places, -1)[tokens.cpu().numpy()])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seqs=st.lists(
        st.tuples(st.integers(-1, 4), st.sampled_from([1, 1, 2, 15, 16, 17, 33, 255, 256, 257]), st.booleans()),
        min_size=1,
        max_size=7,
    ),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_chunks_of_sequences(seqs: list[tuple[int, int, bool]], padding: tuple[int, int], device: torch.device) -> None:
    check_tokens(seqs, padding, 5, device)


@pytest.mark.parametrize(("num_seqs", "max_loras"), [(1, 1), (30, 64), (257, 8), (40, MAX_PLACES)])
def test_decodes(num_seqs: int, max_loras: int, device: torch.device) -> None:
    """One token each; more sequences than a chunk, and more places than sequences."""
    random = np.random.default_rng(num_seqs)
    places = random.integers(-1, max_loras, num_seqs)
    live = random.random(num_seqs) < 0.8
    check_tokens(
        [(place, 1, bool(here)) for place, here in zip(places.tolist(), live, strict=True)], (2, 2), max_loras, device
    )


def test_no_sequence_has_an_adapter(device: torch.device) -> None:
    check_tokens([(-1, 3, True), (-1, 1, True), (2, 2, False)], (1, 0), 3, device)


@pytest.mark.parametrize("max_loras", [1, 3, 64])
@pytest.mark.parametrize("num_rows", [1, 2, 63, 100, FEW_ROWS, FEW_ROWS + 1, 3000])
def test_no_split_of_rows_needs_more_tiles(num_rows: int, max_loras: int) -> None:
    """The worst: every place but one with a row more than whole tiles."""
    size = tile_rows(num_rows)
    for ahead in range(size + 1):
        counts = [1 + (ahead if place else 0) for place in range(max_loras)]
        counts = np.diff(np.minimum(np.cumsum([0, *counts]), num_rows)).tolist()
        counts[0] += num_rows - sum(counts)
        needed = sum(-(-count // size) for count in counts)
        assert needed <= num_tiles(num_rows, max_loras)


def test_wrong_arguments_are_named(device: torch.device) -> None:
    sizes = StepSizes.decode(4)
    buffers, table = StepBuffers.empty(sizes, 1, device), RowTable.empty(4, 2, device)
    places = ints([-1] * 4, device)
    for message, call in (
        ("--max-loras: 0, must be 1 to 256", lambda: RowTable.empty(4, 0, device)),
        ("--max-loras: 257, must be 1 to 256", lambda: RowTable.empty(4, 257, device)),
        ("sizes: ", lambda: sort_tokens(buffers, StepSizes.decode(5), places, places, table)),
        ("slot_places must be contiguous", lambda: sort_tokens(buffers, sizes, places.long(), places, table)),
        ("token_places: 3 are less than the 4", lambda: sort_tokens(buffers, sizes, places, places[:3], table)),
        ("table: has room for 4 rows, not for 5", lambda: sort_rows(places, torch.zeros(5, dtype=torch.int64), table)),
        ("tokens must be contiguous", lambda: sort_rows(places, places, table)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
