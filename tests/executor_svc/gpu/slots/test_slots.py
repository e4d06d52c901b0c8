"""The device's slots follow the host's through any history, also where the host is a step behind."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.batch.slots import Slots
from executor_svc.gpu.kernels.slots.slot_updates import RUN_WORDS, UpdateCounts, apply_updates
from executor_svc.gpu.kernels.slots.slots import SlotState, StepSizes
from executor_svc.gpu.slots import device_slots as gpu_slots
from executor_svc.gpu.slots import staging as gpu_staging
from executor_svc.gpu.slots.device_slots import DeviceSlots
from executor_svc.gpu.slots.staging import Download, StagedChanges, Upload
from executor_svc.plan.limits import GroupShape
from tests.executor_svc.gpu.slots.slot_histories import LIMITS, MOST, History
from tests.helpers.executor.plans import columns, ints, plan, scheduled, sequence

LEAST_STAGING = MOST.num_words + RUN_WORDS


@pytest.fixture(autouse=True)
def _no_word_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch writes in any order: what a word holds must not depend on it."""

    def checked(staging: torch.Tensor, counts: UpdateCounts, state: SlotState) -> None:
        words, buffer = np.zeros(state.words.numel(), np.int32), staging.cpu().numpy()
        runs = buffer[counts.first : counts.first + 3 * counts.num_runs].reshape(3, -1)
        for target, _, length in runs.T:
            words[target : target + length] += 1
        singles = buffer[counts.first + 3 * counts.num_runs : counts.end]
        np.add.at(words, singles[: counts.num_words], 1)
        np.add.at(words, state.num_tokens.storage_offset() + singles[2 * counts.num_words :][: counts.num_given], 1)
        assert words.max() <= 1
        apply_updates(staging, counts, state)

    monkeypatch.setattr(gpu_slots, "apply_updates", checked)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("behind", [False, True])
def test_random_histories(device: torch.device, seed: int, behind: bool) -> None:
    history = History(device, seed, behind, LEAST_STAGING)
    history.run(25)
    assert (history.num_idle > 0) == behind, "some slot is planned that has stopped, if the host can not know"


@pytest.mark.parametrize(
    "groups", [(GroupShape(0, 2), GroupShape(9, 3)), (GroupShape(9),), (GroupShape(), GroupShape(5))]
)
def test_random_histories_of_kv_groups(device: torch.device, groups: tuple[GroupShape, ...]) -> None:
    History(device, 3, False, LEAST_STAGING, groups).run(25)
    History(device, 4, True, LEAST_STAGING, groups).run(15)


# ---------------------------------------------------------------- by name: what histories meet by chance


STOPPING = SequenceSampling(stop_token_ids=ints(9, 41))


def started(device: torch.device) -> tuple[Slots, DeviceSlots]:
    """Slot 0 stops at 9 and 41, slot 2 at no token; both have sampled one token, 7."""
    host, slots = Slots(LIMITS), DeviceSlots(LIMITS, device)
    admitted = (sequence(0, [5, 6], [3, 4], sampling=STOPPING), sequence(2, [8], [5, 6]))
    run(host, slots, plan(admitted=admitted, scheduled=scheduled((0, 2, True), (2, 1, True))), [7, 7])
    return host, slots


def run(host, slots, step, tokens, errors=None, sizes=None, planned=None):
    """Run a step on both; returns the device's tensors and the results it reports."""
    host.apply(step)
    actual = host.schedule(step)
    planned = planned or actual
    sizes = sizes or StepSizes(int(planned.num_tokens.sum()), *[len(planned.slots)] * 3)
    slots.apply(step)
    inputs = slots.build(planned, sizes)
    found = np.zeros(sizes.num_rows, np.int64) if errors is None else ints(*errors)
    device = slots.state.words.device
    results = slots.commit(
        planned, sizes, torch.tensor(tokens, device=device), torch.from_numpy(found).to(device, torch.int32)
    )
    live = np.isin(planned.sampling_slots, actual.sampling_slots)
    host.commit(actual, ints(*tokens)[: len(live)][live], found[: len(live)][live] == 0)
    return inputs, results.wait()


def test_a_slot_that_has_just_stopped_is_padding_and_idle(device: torch.device) -> None:
    host, slots = started(device)
    ready = plan(decode_ready=True)
    unaware = host.schedule(ready)
    _, results = run(host, slots, ready, [9, 8])
    assert results.token_ids.tolist() == [9, 8]
    assert not results.errors.any()
    inputs, results = run(host, slots, ready, [1, 1], planned=unaware)
    assert inputs.rows.tolist() == [-1, 2]
    assert inputs.seq_lens.tolist() == [0, 3]
    assert inputs.slot_mapping.tolist() == [-1, 5 * LIMITS.block_size + 2]
    assert inputs.token_ids.tolist() == [0, 8]
    assert results.idle.tolist() == [True, False]
    assert results.token_ids.tolist() == [-1, 1]
    assert slots.state.num_tokens[0].item() == 4
    assert slots.state.token_ids[0, :5].tolist() == [5, 6, 7, 9, 0]


def test_an_error_stops_its_slot_alone(device: torch.device) -> None:
    host, slots = started(device)
    _, results = run(host, slots, plan(decode_ready=True), [3, 3], [4, 0])
    assert results.errors.tolist() == [4, 0]
    assert results.token_ids.tolist() == [-1, 3]
    assert slots.state.stopped[:3].tolist() == [1, 0, 0]
    assert host.stopped[:3].tolist() == [True, False, False]


def test_stop_ids_wait_for_min_tokens_and_are_forgotten(device: torch.device) -> None:
    host, slots = Slots(LIMITS), DeviceSlots(LIMITS, device)
    late = SequenceSampling(stop_token_ids=ints(31, 32, 63, 64, 32), min_tokens=2)
    run(host, slots, plan(admitted=(sequence(1, [1], [0, 1], sampling=late),), decode_ready=True), [31])
    assert slots.state.stopped[1].item() == 0
    run(host, slots, plan(decode_ready=True), [64])
    assert slots.state.stopped[1].item() == 1
    other = sequence(1, [1], [0, 1], sampling=SequenceSampling(stop_token_ids=ints(33)))
    step = plan(released_slots=ints(1), admitted=(other,), decode_ready=True)
    for token, stopped in ((31, 0), (64, 0), (32, 0), (63, 0), (33, 1)):
        run(host, slots, step, [token])
        assert slots.state.stopped[1].item() == stopped == host.stopped[1]
        step = plan(decode_ready=True)


def test_forks_of_a_slot_that_has_stopped_stop_too(device: torch.device) -> None:
    host, slots = started(device)
    fork = sequence(4, [5, 6, 7], [20, 21], 2)
    run(host, slots, plan(decode_ready=True), [9, 8])
    step = plan(decode_ready=True, admitted=(fork,), forks=columns((4, 0)))
    _, results = run(host, slots, step, [8])
    assert results.token_ids.tolist() == [8]
    assert slots.state.stopped[[0, 2, 4]].tolist() == [1, 0, 1] == host.stopped[[0, 2, 4]].tolist()


def test_a_plan_that_computes_nothing_is_flushed_or_goes_with_the_next(device: torch.device) -> None:
    host, slots = started(device)
    given = plan(released_slots=ints(0), admitted=(sequence(0, [3], [1]),), appends=columns((0, 2)))
    again = plan(released_slots=ints(0), admitted=(sequence(0, [4, 4], [8]),))
    for step in (given, again):
        host.apply(step)
        slots.apply(step)
    assert slots.state.token_ids[0, :1].tolist() == [3], "what one plan wrote, the next may write: not in one launch"
    slots.flush()
    assert slots.state.token_ids[0, :2].tolist() == [4, 4]
    assert slots.state.num_tokens[0].item() == 2
    assert slots.state.block_tables[0, :2].tolist() == [8, 2]
    inputs, _ = run(host, slots, plan(scheduled=scheduled((0, 2, True))), [1])
    assert inputs.slot_mapping.tolist() == [8 * LIMITS.block_size, 8 * LIMITS.block_size + 1]


def test_others_learn_what_a_plan_changed(device: torch.device) -> None:
    host = Slots(LIMITS)
    slots = DeviceSlots(LIMITS, device, extra_words=8)
    assert slots.extra.tolist() == [0] * 8
    waits = SequenceSampling(num_candidates=2)
    admitted = (sequence(3, [1, 2, 3], [0], sampling=waits), sequence(1, [4], [2]))
    step = plan(admitted=admitted, scheduled=scheduled((3, 3, True), (1, 1, True)))
    host.apply(step)
    applied = slots.apply(step)
    slots.write(slots.extra[2:5], ints(-1, 2**31 - 1, -(2**31)))
    planned = host.schedule(step)
    sizes = StepSizes(4, 2, 2, 2)
    inputs = slots.build(planned, sizes)
    assert applied.slots.tolist() == [3, 1]
    assert applied.max_tokens == 3
    assert slots.extra.tolist() == [0, 0, -1, 2**31 - 1, -(2**31), 0, 0, 0]
    results = slots.commit(planned, sizes, torch.tensor([6, 6], device=device), torch.zeros_like(inputs.rows)).wait()
    assert results.token_ids.tolist() == [6, -1]
    assert not results.errors.any()
    assert inputs.taken.tolist() == [6, -1]
    host.commit(planned, ints(6, 6), np.ones(2, np.bool_))
    step = plan(given=columns((3, 69)))
    host.apply(step)
    applied = slots.apply(step)
    slots.flush()
    assert not applied.slots.numel()
    assert slots.state.token_ids[3, :4].tolist() == [1, 2, 3, 69] == host.token_ids[3, :4].tolist()


def test_tensors_of_a_size_stay_where_they_are(device: torch.device) -> None:
    host, slots = started(device)
    sizes = StepSizes.decode(4)
    first, _ = run(host, slots, plan(decode_ready=True), [1, 1, 0, 0], sizes=sizes)
    again, _ = run(host, slots, plan(decode_ready=True), [1, 1, 0, 0], sizes=sizes)
    names = [name for name in first.__slots__ if name != "sizes"]
    assert [getattr(first, name).data_ptr() for name in names] == [getattr(again, name).data_ptr() for name in names]
    assert all(getattr(first, name).data_ptr() % 16 == 0 for name in names)


def test_the_same_decodes_again_send_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    host, slots = started(device)
    send, num_sent = Upload.send, []

    def counted(upload: Upload, num_words: int) -> None:
        num_sent.append(num_words)
        send(upload, num_words)

    monkeypatch.setattr(Upload, "send", counted)

    def sends(step: StepPlan, sizes: StepSizes, num_slots: int) -> bool:
        num_sent.clear()
        inputs, _ = run(host, slots, step, [1] * num_slots + [0] * (sizes.num_rows - num_slots), sizes=sizes)
        there = host.ready()
        assert inputs.positions[:num_slots].tolist() == (host.num_computed_tokens[there] - 1).tolist()
        return bool(num_sent)

    ready = plan(decode_ready=True)
    assert [sends(ready, StepSizes.decode(4), 2) for _ in range(3)] == [True, False, False]
    assert sends(ready, StepSizes.decode(2), 2)
    assert sends(plan(decode_ready=True, appends=columns((0, 9), (2, 10))), StepSizes.decode(2), 2)
    assert not sends(ready, StepSizes.decode(2), 2)
    slots.flush()
    assert not sends(ready, StepSizes.decode(2), 2)
    assert sends(plan(decode_ready=True, held_slots=ints(0)), StepSizes.decode(2), 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_graph_holds_all_but_the_copies(device: torch.device) -> None:
    host, slots = started(device)
    sizes, ready = StepSizes.decode(4), plan(decode_ready=True)
    tokens = torch.zeros(4, dtype=torch.int64, device=device)
    errors = torch.zeros(4, dtype=torch.int32, device=device)
    run(host, slots, ready, [1, 1, 0, 0], sizes=sizes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots.launch_build(sizes, one_each=True)
        # The token is the position that it goes to.
        tokens.copy_(slots.inputs(sizes).sample_positions)
        slots.launch_commit(sizes, tokens, errors)
    pending = []
    for _ in range(3):
        slots.apply(ready)
        planned = host.schedule(ready)
        assert slots.stage(planned, sizes)
        graph.replay()
        pending.append(slots.fetch(planned, sizes))
        host.commit(planned, host.num_tokens[planned.slots], np.ones(2, np.bool_))
    assert [each.wait().token_ids.tolist() for each in pending] == [[4, 3], [5, 4], [6, 5]]
    assert slots.state.token_ids[0, :7].tolist() == host.token_ids[0, :7].tolist()


def test_a_plan_larger_than_the_staging_buffer_goes_in_pieces(device: torch.device) -> None:
    limits = replace(LIMITS, max_model_len=3000, num_device_blocks=10_000)
    host, slots = Slots(limits), DeviceSlots(limits, device, MOST, LEAST_STAGING)
    rng = np.random.default_rng(0)
    lengths = (2999, 1, RUN_WORDS, 700)
    admitted = tuple(
        sequence(
            slot,
            rng.integers(0, 70, length).tolist(),
            rng.integers(0, 10_000, 700 if slot == 3 else 750).tolist(),
            length - 1,
        )
        for slot, length in enumerate(lengths)
    )
    appends = columns(*((3, block) for block in range(50)))
    inputs, results = run(host, slots, plan(admitted=admitted, appends=appends, decode_ready=True), [1, 2, 3, 4])
    assert results.token_ids.tolist() == [1, 2, 3, 4]
    assert inputs.positions.tolist() == [length - 1 for length in lengths]
    for slot, length in enumerate(lengths):
        assert slots.state.token_ids[slot, : length + 1].tolist() == host.token_ids[slot, : length + 1].tolist()
        assert slots.state.block_tables[slot].tolist() == host.block_tables[slot].tolist()


# ---------------------------------------------------------------- what can not be


def test_steps_that_do_not_fit_are_refused(device: torch.device) -> None:
    host, slots = started(device)
    planned = host.schedule(plan(decode_ready=True))
    for sizes in (StepSizes(1, 2, 2, 2), StepSizes(2, 1, 2, 2), StepSizes(2, 2, 1, 2), StepSizes(2, 2, 2, 1)):
        with pytest.raises(ValueError, match="sizes: the step needs"):
            slots.build(planned, sizes)
    with pytest.raises(ValueError, match=r"sizes: .* are not within those of the buffers"):
        slots.build(planned, StepSizes.decode(LIMITS.max_num_seqs + 1))
    with pytest.raises(ValueError, match=f"staging_words must be at least {LEAST_STAGING}"):
        DeviceSlots(LIMITS, device, MOST, LEAST_STAGING - 1)
    with pytest.raises(ValueError, match="target is no view"):
        slots.write(torch.zeros(4, dtype=torch.int32, device=device), ints(1))
    with pytest.raises(ValueError, match="too small for 2 words"):
        slots.write(slots.state.token_ids[0, :1], ints(1, 2))


# ---------------------------------------------------------------- staging


class LateEvent:
    """Happens when the test says so."""

    def __init__(self) -> None:
        self.done = True
        self.waited = False

    def record(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = self.waited = True


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[LateEvent]:
    made: list[LateEvent] = []

    def make(device: torch.device) -> LateEvent:
        made.append(LateEvent())
        return made[-1]

    monkeypatch.setattr(gpu_staging, "new_event", make)
    return made


def test_a_buffer_that_is_being_copied_is_left_alone(events: list[LateEvent]) -> None:
    upload = Upload(4, torch.device("cpu"), num_buffers=2)
    sent = []
    for value in range(4):
        sent.append(upload.take())
        sent[-1][:] = value
        upload.send(2)
        assert upload.on_device.tolist() == [value, value, 0, 0]
    assert [words.tolist() for words in sent] == [[value] * 4 for value in range(4)]
    assert len(events) == 4
    assert not any(event.waited for event in events)
    events[0].done = True
    assert upload.take() is sent[0]


def test_results_are_kept_until_they_are_read(events: list[LateEvent]) -> None:
    download = Download(4, torch.device("cpu"))
    fetched = [download.fetch(torch.full((3,), value, dtype=torch.int32)) for value in range(4)]
    assert [each.is_done() for each in fetched] == [False] * 4
    assert [each.wait().tolist() for each in reversed(fetched)] == [[value] * 3 for value in (3, 2, 1, 0)]
    later = [download.fetch(torch.full((4,), 9, dtype=torch.int32)) for _ in range(4)]
    assert len(events) == 4, "buffers are taken again once they have been read"
    assert fetched[0].wait().tolist() == [0] * 3
    assert fetched[0].is_done()
    assert later[0].wait().tolist() == [9] * 4


def spread(words: np.ndarray, buffer: np.ndarray, counts: UpdateCounts) -> None:
    """What `slot_updates` does with runs and single words, in plain numpy."""
    runs = buffer[counts.first : counts.first + 3 * counts.num_runs].reshape(3, -1)
    for target, source, length in runs.T:
        assert 0 < length <= RUN_WORDS
        words[target : target + length] = buffer[source : source + length]
    singles = buffer[counts.first + 3 * counts.num_runs :][: 2 * counts.num_words].reshape(2, -1)
    words[singles[0]] = singles[1]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 40), st.integers(1000, 3100)), max_size=5),
    num_singles=st.integers(0, 900),
    num_given=st.integers(0, 900),
    room=st.integers(RUN_WORDS, 4 * RUN_WORDS),
    first=st.integers(0, 7),
)
def test_changes_are_the_same_in_any_number_of_pieces(
    lengths: list[int], num_singles: int, num_given: int, room: int, first: int
) -> None:
    total = sum(lengths) + num_singles
    wanted = np.arange(1, total + 1)
    changes = StagedChanges()
    ends = np.cumsum([0, *lengths])
    for start, end in itertools.pairwise(ends):
        changes.write(int(start), wanted[start:end])
    singles = np.arange(ends[-1], total)
    changes.write_singles(singles, wanted[singles])
    changes.give_tokens(np.arange(num_given), np.arange(num_given) + 7)
    words, given_pairs = np.zeros(total, np.int64), []
    for piece in changes.split(room):
        assert piece
        assert piece.num_words() <= room
        buffer = np.full(first + room, -1, np.int32)
        counts = piece.pack(buffer, first)
        assert piece.packed_end(counts) == first + piece.num_words()
        assert (buffer[:first] == -1).all()
        assert (buffer[piece.packed_end(counts) :] == -1).all()
        spread(words, buffer, counts)
        given_at = counts.end - 2 * counts.num_given
        given_pairs += buffer[given_at : counts.end].reshape(2, -1).T.tolist()
    assert (words == wanted).all()
    assert given_pairs == [[slot, slot + 7] for slot in range(num_given)]
