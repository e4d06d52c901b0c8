"""Heads on the GPU's path: their drafts are those of the head over the whole text, and no token changes.

The head's layers of the cache are full of NaN: a row that reads what was not computed there gives no draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.plan.plan import BlockMoves
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.config import ExecutorConfig
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.models.adapters.places import AdapterSizes
from executor_svc.models.heads.eagle3_loading import load_eagle3
from executor_svc.models.heads.mtp_loading import load_mtp
from executor_svc.startup.grammars import find_grammars
from executor_svc.startup.speculation import Draft
from executor_svc.worker.worker import Launched
from tests.executor_svc.driver import Model, spoil
from tests.executor_svc.gpu.drafted_steps import (
    MAX_DRAFTS,
    WITH_DRAFTS,
    Outputs,
    copies_of_decodes,
    note_device_calls,
    outputs,
)
from tests.executor_svc.gpu.drafts.watched_head import WatchedHead
from tests.executor_svc.gpu.runner.test_adapters import Run, save_adapters
from tests.helpers.executor.plans import columns, ints, scheduled, sequence
from tests.helpers.executor.stepping import Stepper
from tests.helpers.models.agreeing_heads import SHAPE, make_agreeing
from tests.helpers.models.eagle3_heads import HeadShape, ReferenceHead, make_head
from tests.helpers.models.mtp_heads import ReferenceMtp, make_mimo
from tests.helpers.models.qwen_mtp import make_qwen_mtp

DRAWN = SequenceSampling(temperature=0.7, seed=3, top_k=9)
TEXT = [3, 9, 27, 81, 5, 6, 7, 8, 9, 10, 11, 12, 40, 41, 42, 43, 44, 45, 46]


class Headed(NamedTuple):
    """A target on both devices, and its head on the GPU."""

    cpu: Model
    gpu: Model
    head: Draft
    reference: Callable[[], ReferenceHead]

    def stepper(self, **limits: Any) -> Stepper:
        stepper = Stepper(self.gpu, draft=self.head, **WITH_DRAFTS | limits)
        spoil(stepper.pools)
        return stepper


def on_both(folder: Path, head: Path | None, reference: Callable[[], ReferenceHead], **options: Any) -> Headed:
    """head: its folder; None: that of the checkpoint."""
    gpu = Model(folder, device="cuda", **options)
    config = ExecutorConfig(**gpu.options)
    if head is None:
        loaded: Draft = load_mtp(config, gpu.device, gpu.loaded)
    else:
        loaded = load_eagle3(str(head), config, gpu.device, gpu.loaded)
    return Headed(Model(folder, **options), gpu, loaded, reference)


def mimo(folder: Path, predicts: bool = True, **options: Any) -> Headed:
    make_mimo(folder, predicts=predicts, num_hidden_layers=1, **options)
    return on_both(folder, None, lambda: ReferenceMtp(folder), num_cpu_blocks=8)


def eagle3(folder: Path) -> Headed:
    """A head with some of the ids, which agrees with its target."""
    target, head = make_agreeing(folder)
    return on_both(target, head, lambda: ReferenceHead(head, SHAPE, embedding=embedding_of(target)))


def embedding_of(folder: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


def other_eagle3(folder: Path) -> Headed:
    """A head of two layers whose drafts are right by chance alone, with all ids."""
    shape = HeadShape(
        layer_ids=(0, 1), draft_vocab_size=131, decoder={"num_hidden_layers": 2},
        flags={"norm_before_residual": True, "norm_output": True},
    )  # fmt: skip
    target, _ = make_agreeing(folder)
    head = make_head(folder / "other", shape)
    return on_both(target, head, lambda: ReferenceHead(head, shape))


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Headed:
    return mimo(tmp_path_factory.mktemp("mimo"))


def undrafted(model: Model, fields: dict[str, Any], num_steps: int) -> Outputs:
    """What the sequences of a step get on the CPU, by single tokens."""
    stepper, found = Stepper(model, max_drafts=MAX_DRAFTS), Outputs()
    for each in (fields, *[{"decode_ready": True}] * num_steps):
        found.add(stepper.step(**each))
    return found


def begun(*texts: list[int], samplings: tuple[SequenceSampling, ...]) -> dict[str, Any]:
    each = zip(texts, samplings, strict=True)
    return {
        "admitted": tuple(
            sequence(slot, text, Stepper.blocks(slot), sampling=sampling, max_drafts=3)
            for slot, (text, sampling) in enumerate(each)
        ),
        "scheduled": scheduled(*((slot, len(text), True) for slot, text in enumerate(texts))),
    }


@pytest.mark.parametrize(
    ("make", "right"),
    [
        pytest.param(mimo, 10, id="mtp"),
        pytest.param(eagle3, 10, id="eagle3"),
        pytest.param(other_eagle3, 0, id="two layers", marks=pytest.mark.long),
    ],
)
def test_drafts_are_those_of_the_head_over_the_whole_text(
    make: Callable[[Path], Headed], right: int, tmp_path: Path
) -> None:
    """Of a greedy sequence and a drawn one, in chunks beside decodes; with any numbers of drafts, and none."""
    made = make(tmp_path)
    stepper, found = made.stepper(), Outputs()
    watched = WatchedHead(stepper, made.reference())
    first = sequence(0, TEXT[:12], Stepper.blocks(0), max_drafts=3)
    second = sequence(1, [8, 9] * 4, Stepper.blocks(1), sampling=DRAWN, max_drafts=2)
    found.add(stepper.step(admitted=(first,), scheduled=scheduled((0, 5, False))))
    found.add(stepper.step(scheduled=scheduled((0, 7, True))))
    decode = {"decode_ready": True, "max_drafts": 3}
    found.add(stepper.step(admitted=(second,), scheduled=scheduled((1, 5, False)), **decode))
    found.add(stepper.step(scheduled=scheduled((1, 3, True)), **decode))
    for most in (3, 1, 0, 2, 3):
        found.add(stepper.step(**decode | {"max_drafts": most}))
    greedy = [(drafts, expected) for slot, drafts, expected in watched.proposals if slot == 0]
    assert [len(drafts) for drafts, _ in greedy] == [3, 3, 3, 1, 2, 3]
    assert all(drafts == expected for drafts, expected in greedy)
    assert found.num_accepted >= right
    assert found.num_drafts > found.num_accepted
    plain = undrafted(made.cpu, begun(TEXT[:12], [8, 9] * 4, samplings=(SequenceSampling(), DRAWN)), 22)
    assert found.tokens == {slot: plain.tokens[slot][: len(tokens)] for slot, tokens in found.tokens.items()}
    assert len(found.tokens[0]) > 7 + right // 2


@pytest.mark.long
@pytest.mark.parametrize("make", [mimo, eagle3], ids=["mtp", "eagle3"])
def test_requests_of_many_kinds_have_the_same_tokens(make: Callable[[Path], Headed], tmp_path: Path) -> None:
    """With penalties, bad words, stop ids, logprobs, two steps in flight."""
    made = make(tmp_path)
    expected = outputs(Stepper(made.cpu, max_drafts=MAX_DRAFTS), 0)
    found = outputs(made.stepper(), MAX_DRAFTS)
    assert (found.tokens, found.ended, found.top) == (expected.tokens, expected.ended, expected.top)
    assert found.num_accepted > 25


def test_blocks_take_the_heads_keys_along(tmp_path: Path) -> None:
    """Through a prefix hit, a copy, and a swap to the host and back into other blocks: drafts are the whole text's."""
    made = mimo(tmp_path, predicts=False)
    stepper, found = made.stepper(), Outputs()
    watched = WatchedHead(stepper, made.reference())
    decode = {"decode_ready": True, "max_drafts": 3}
    texts = [TEXT, [*TEXT[:17], 1, 2]]
    found.add(stepper.step(**begun(TEXT, samplings=(SequenceSampling(),))))
    watched.states[1] = dict(watched.states[0])
    hit = sequence(1, texts[1], [0, 1, 20, 21, 22], computed=16, max_drafts=3)
    found.add(stepper.step(admitted=(hit,), scheduled=scheduled((1, 3, True)), **decode))
    found.add(stepper.step(**decode))
    texts = [text + found.tokens[slot] for slot, text in enumerate(texts)]
    away = BlockMoves(ints(0, 1, 2, 3), ints(4, 5, 6, 7))
    found.add(stepper.step(released_slots=ints(0, 1), swap_out=away))
    spoil(stepper.pools)
    back, known = BlockMoves(ints(4, 5, 6, 7), ints(40, 41, 42, 43)), len(texts[0]) - 1
    watched.states |= {slot: dict(watched.states[0]) for slot in (2, 3)}
    again = sequence(2, texts[0], [40, 41, 42, 43, 44, 45], computed=known, prompt=19, max_drafts=3)
    result = stepper.step(admitted=(again,), swap_in=back, **decode)
    # The result of its last row is not there: the next step has drafts.
    assert not any(result.num_drafts)
    found.add(result)
    place = known // 8
    copied = sequence(3, texts[0], [*range(40, 40 + place), *range(60, 64)], computed=known, prompt=19, max_drafts=3)
    found.add(stepper.step(admitted=(copied,), copies=BlockMoves(ints(40 + place), ints(60)), **decode))
    found.add(stepper.step(**decode))
    proposals = watched.proposals
    assert {slot for slot, *_ in proposals} == {0, 1, 2, 3}
    assert all(len(drafts) == 3 and drafts == expected for _, drafts, expected in proposals)
    plain = undrafted(made.cpu, begun(TEXT, [*TEXT[:17], 1, 2], samplings=(SequenceSampling(),) * 2), 22)
    for slot in (0, 1):
        assert found.tokens[slot] == plain.tokens[slot][: len(found.tokens[slot])]
    for slot in (2, 3):
        tokens = found.tokens[0] + found.tokens[slot]
        assert tokens == plain.tokens[0][: len(tokens)]


@pytest.mark.parametrize(
    "sampling", [pytest.param(SequenceSampling(), marks=pytest.mark.long), DRAWN], ids=["greedy", "drawn"]
)
def test_the_same_decodes_send_nothing_and_are_four_graphs(
    sampling: SequenceSampling, with_mtp: Headed, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, replayed = note_device_calls(monkeypatch)
    stepper, found = with_mtp.stepper(), Outputs()
    found.add(stepper.step(**begun(TEXT[:12], samplings=(sampling,))))
    replayed.clear()
    assert copies_of_decodes(stepper, sent, found) == [1, 0, 0]
    # Of the drafts, of the tokens' logits, of the choices, of the head's rows.
    assert replayed == [StepSizes.decode(1, 3)] * 12
    assert found.num_drafts == 9
    replayed.clear()
    found.add(stepper.step(decode_ready=True))
    # Of the tokens' logits, of the choices, of the head's rows.
    assert replayed == [StepSizes.decode(1)] * 3


def test_blocks_have_room_for_the_heads_keys_and_values(with_mtp: Headed) -> None:
    gpu, draft = with_mtp.gpu, with_mtp.head
    config, geometry = ExecutorConfig(**gpu.options), gpu.loaded.geometry
    alone, beside = (gpu.device.new_kv_cache(geometry, config, 0, layers) for layers in (None, draft.layers))
    assert beside.bytes_per_block == 2 * alone.bytes_per_block  # a layer of the target, and one like it
    assert draft.layers.weight_bytes == 4 * draft.num_parameters  # embedding and head are the target's


def test_forks_have_drafts_from_their_second_step_on(with_mtp: Headed) -> None:
    stepper, found = with_mtp.stepper(), Outputs()
    text = TEXT[:12]
    fork = sequence(1, text, [0, 40, 41, 42], computed=11, sampling=DRAWN, max_drafts=3)
    first = sequence(0, text, Stepper.blocks(0), max_drafts=3)
    found.add(stepper.step(admitted=(first, fork), scheduled=scheduled((0, 12, True)), forks=columns((1, 0))))
    decode = {"decode_ready": True, "max_drafts": 3}
    counts = []
    for fields in ({"copies": BlockMoves(ints(1), ints(40))}, {}, {}):
        result = stepper.step(**decode | fields)
        counts.append(dict(zip(result.slots.tolist(), result.num_drafts.tolist(), strict=True)))
        found.add(result)
    assert counts == [{0: 3, 1: 0}, {0: 3, 1: 3}, {0: 3, 1: 3}]
    assert found.num_accepted > 6
    plain = undrafted(with_mtp.cpu, begun(text, text, samplings=(SequenceSampling(), DRAWN)), 16)
    assert found.tokens == {slot: plain.tokens[slot][: len(tokens)] for slot, tokens in found.tokens.items()}


def test_cleared_slots_have_no_drafts_from_earlier_results(with_mtp: Headed) -> None:
    stepper = with_mtp.stepper()
    stepper.step(**begun(TEXT, samplings=(SequenceSampling(),)))
    assert stepper.step(decode_ready=True, max_drafts=3).num_drafts.tolist() == [3]
    stepper.executor.clear()
    again = sequence(0, TEXT, Stepper.blocks(0), computed=18, max_drafts=3)
    assert not any(stepper.step(admitted=(again,), decode_ready=True, max_drafts=3).num_drafts)
    assert stepper.step(decode_ready=True, max_drafts=3).num_drafts.tolist() == [3]


def test_beside_grammars_whose_slots_have_none(tmp_path: Path) -> None:
    """Masks come late, so the head follows behind the sampling; one row takes no token in a step."""
    made = mimo(tmp_path, tokenizer=True, vocab_size=300)
    letters = GrammarSpec("regex", "[ab]{2,20}")
    first = {
        "admitted": (
            sequence(0, TEXT[:6], Stepper.blocks(0), grammar=letters, max_drafts=3),
            sequence(1, TEXT[:12], Stepper.blocks(1), max_drafts=3),
        ),
        "scheduled": scheduled((0, 6, True), (1, 12, True)),
    }
    found = {}
    for name, model, most in (("cpu", made.cpu, 0), ("gpu", made.gpu, 3)):
        grammars = find_grammars(model.loaded)
        assert grammars is not None
        stepper = Stepper(model, grammars=grammars, draft=made.head if most else None, **WITH_DRAFTS)
        masks = stepper.executor.grammars
        assert masks is not None
        begun_steps, found[name] = deque[Launched](), Outputs()
        for step_id in range(1, 6 if most else 14):
            masks.recorded = lambda slot, late=most and step_id == 3: late and slot == 0
            fields = first if step_id == 1 else {"decode_ready": True, "max_drafts": most}
            begun_steps.append(stepper.launch(step_id=step_id, **fields))
            if len(begun_steps) == 2:
                found[name].add(begun_steps.popleft().result())
        found[name].add(begun_steps.popleft().result())
    ours, theirs = found["gpu"], found["cpu"]
    assert ours.tokens == {slot: theirs.tokens[slot][: len(tokens)] for slot, tokens in ours.tokens.items()}
    assert len(ours.tokens[0]) == 4
    assert ours.num_accepted > 5


@pytest.mark.long
def test_beside_adapters_of_the_target(tmp_path: Path) -> None:
    """The head has none: its drafts are right less often."""
    target, head = make_agreeing(tmp_path)
    model = Model(target, AdapterSizes(num_places=2, max_rank=40), device="cuda", enforce_eager=True)
    loaded = load_eagle3(str(head), ExecutorConfig(**model.options), model.device, model.loaded)
    adapters = save_adapters(target, tmp_path / "adapters")
    plain, drafted = (Run(model, adapters, draft=draft, **WITH_DRAFTS) for draft in (None, loaded))
    spoil(drafted.stepper.pools)
    num_accepted = 0
    for run, most in ((plain, 0), (drafted, 3)):
        prompts = tuple(run.begin(slot, sampling=SequenceSampling(), max_drafts=3) for slot in (1, 2, 3))
        run.step(admitted=prompts, scheduled=scheduled((1, 9, True), (2, 5, True), (3, 4, True)))
        for _ in range(5 if most else 18):
            num_accepted += sum(run.step(decode_ready=True, max_drafts=most).num_accepted)
    for slot, tokens in drafted.tokens.items():
        assert plain.tokens[slot][: len(tokens)] == tokens
    assert num_accepted > 3


@pytest.mark.long
def test_a_head_of_a_model_with_recurrent_states(tmp_path: Path) -> None:
    """Refused drafts leave the state where it was."""
    shape = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1]}
    folder = make_qwen_mtp(tmp_path, "qwen3_next", predicts=True, **shape)
    drafting = {"speculative": "mtp", "num_speculative_tokens": 3}  # of the tail of states
    made = on_both(folder, None, lambda: ReferenceMtp(folder), **drafting)
    found = {}
    for name, stepper, most in (("cpu", Stepper(made.cpu, max_drafts=3), 0), ("gpu", made.stepper(), 3)):
        found[name] = Outputs()
        begin = tuple(
            sequence(
                slot, text, stepper.pages(Stepper.blocks(slot)), sampling=sampling, max_drafts=3,
                state_pages=stepper.state(slot),
            )
            for slot, (text, sampling) in enumerate(((TEXT[:12], SequenceSampling()), ([8, 9] * 4, DRAWN)))
        )  # fmt: skip
        steps = [{"admitted": begin, "scheduled": scheduled((0, 12, True), (1, 8, True))}]
        steps += [{"decode_ready": True, "max_drafts": most}] * (4 if most else 16)
        for fields in steps:
            found[name].add(stepper.step(**fields))
    ours, theirs = found["gpu"], found["cpu"]
    assert ours.tokens == {slot: theirs.tokens[slot][: len(tokens)] for slot, tokens in ours.tokens.items()}
    assert 0 < ours.num_accepted < ours.num_drafts
