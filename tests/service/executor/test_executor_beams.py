"""Beam search by hand over real gRPC: candidates, given tokens, beams that come back over shared and copied blocks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import types_pb2
from tests.helpers.executor.executor_harness import (
    Harness,
    Stream,
    admit,
    first_step_id,
    scheduled,
)

BLOCK_SIZE, NUM_BLOCKS = 8, 64
WIDTH, NUM_STEPS = 3, 13
ASKING = types_pb2.SequenceSampling(top_p=1, repetition_penalty=1, num_candidates=2 * WIDTH)
PENALISED = types_pb2.SequenceSampling(
    top_p=1, repetition_penalty=1.3, num_candidates=2 * WIDTH, bias_token_ids=[3, 60], biases=[1.5, -2]
)


@dataclass
class Beam:
    """A hypothesis that runs: its tokens, all of them computed, and where."""

    slot: int
    tokens: list[int]
    blocks: list[int]
    score: float = 0.0


@dataclass
class Search:
    """What a scheduler knows of one group: its beams and which blocks nobody holds."""

    sampling: types_pb2.SequenceSampling
    prompt: list[int]
    beams: list[Beam] = field(default_factory=list)
    num_copies: int = 0

    def free_blocks(self) -> list[int]:
        held = {block for beam in self.beams for block in beam.blocks}
        return [block for block in range(1, NUM_BLOCKS) if block not in held]

    def first_plan(self) -> dict[str, object]:
        blocks = list(range(1, 1 + -(-len(self.prompt) // BLOCK_SIZE)))
        self.beams = [Beam(0, self.prompt, blocks)]
        admitted = [admit(0, self.prompt, blocks, self.sampling)]
        return {"admitted": admitted, "scheduled": scheduled((0, len(self.prompt), True))}

    def next_plan(self, candidates: dict[int, tuple[list[int], list[float]]]) -> dict[str, object]:
        """The best continuations: a parent's first goes on in its slot by a given token, the others come anew."""
        options = [
            (beam.score + logprob, beam, token)
            for beam in self.beams
            for token, logprob in zip(*candidates[beam.slot], strict=True)
        ]
        best = sorted(options, key=lambda option: -option[0])[:WIDTH]
        parents = {beam.slot for _, beam, _ in best}
        released = [beam.slot for beam in self.beams if beam.slot not in parents]
        # Slots released here are used again only later, as plans would be in flight.
        slots = itertools.cycle(s for s in range(8) if s not in {beam.slot for beam in self.beams})
        free = self.free_blocks()
        given, appends, admitted, copies, beams = [], [], [], [], []
        for score, parent, token in best:
            tokens, num_full = [*parent.tokens, token], len(parent.tokens) // BLOCK_SIZE
            if parent.slot not in {slot for slot, _ in given}:
                fresh = free.pop() if len(tokens) > BLOCK_SIZE * len(parent.blocks) else None
                given.append((parent.slot, token))
                appends += [(parent.slot, fresh)] if fresh is not None else []
                beams.append(Beam(parent.slot, tokens, parent.blocks + [fresh] * (fresh is not None), score))
                continue
            own = free.pop()
            if len(parent.tokens) % BLOCK_SIZE:
                copies.append((parent.blocks[num_full], own))
            beam = Beam(next(slots), tokens, [*parent.blocks[:num_full], own], score)
            admitted.append(
                admit(
                    beam.slot, tokens, beam.blocks, self.sampling, num_prompt_tokens=len(self.prompt),
                    num_computed_tokens=len(tokens) - 1,
                )
            )  # fmt: skip
            beams.append(beam)
        self.beams, self.num_copies = beams, self.num_copies + len(copies)
        return {
            "released_slots": released,
            "copies": [pb.BlockMoves(sources=[a for a, _ in copies], destinations=[b for _, b in copies])],
            "admitted": admitted,
            "appends": [pb.BlockAppends(slots=[s for s, _ in appends], block_ids=[b for _, b in appends])],
            "given": pb.GivenTokens(slots=[s for s, _ in given], token_ids=[t for _, t in given]),
            "decode_ready": True,
        }


def candidates_of(result: pb.StepResult) -> dict[int, tuple[list[int], list[float]]]:
    assert result.status == pb.STEP_STATUS_OK, result.error_message
    assert not result.token_ids
    assert list(result.num_tokens) == [0] * len(result.slots)
    assert [item.slot for item in result.candidates] == list(result.slots)
    return {item.slot: (list(item.token_ids), list(item.logprobs)) for item in result.candidates}


async def by_hand(stream: Stream, step: int, search: Search) -> list[tuple[list[int], tuple[list[int], list[float]]]]:
    """Run the search; returns every hypothesis that was computed, with its candidates."""
    found = candidates_of(await stream.step(step, **search.first_plan()))
    seen = [(search.prompt, found[0])]
    for index in range(1, NUM_STEPS):
        plan = search.next_plan(found)
        result = await stream.step(step + index, **plan)
        found = candidates_of(result)
        assert sorted(found) == sorted(beam.slot for beam in search.beams)
        seen += [(beam.tokens, found[beam.slot]) for beam in search.beams]
    search.next_plan(found)
    return seen


@pytest.mark.sampled(3)
@pytest.mark.parametrize("length", [1, 8, 13])
@pytest.mark.parametrize("sampling", [ASKING, PENALISED], ids=["plain", "penalised"])
async def test_every_beam_is_what_it_is_alone(real: Harness, length: int, sampling: types_pb2.SequenceSampling) -> None:
    prompt = [(11 * i * i + 5) % 129 + 2 for i in range(length)]
    stream, step = await first_step_id(real)
    search = Search(sampling, prompt)
    seen = await by_hand(stream, step, search)
    assert search.num_copies > 0
    assert len(seen) == 1 + (NUM_STEPS - 1) * WIDTH
    stream.call.cancel()
    stream, step = await first_step_id(real)
    for index, (tokens, expected) in enumerate(seen):
        alone = await stream.step(
            step + index,
            released_slots=[5] if index else [],
            admitted=[admit(5, tokens, [40, 41, 42, 43], sampling, num_prompt_tokens=length)],
            scheduled=scheduled((5, len(tokens), True)),
        )
        assert candidates_of(alone)[5] == expected, tokens
    stream.call.cancel()


async def test_the_best_beams_are_those_of_transformers(real: Harness, checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompt = [7, 50, 11, 99, 23]
    stream, step = await first_step_id(real)
    search = Search(ASKING, prompt)
    await by_hand(stream, step, search)
    stream.call.cancel()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=WIDTH, num_return_sequences=WIDTH, do_sample=False,
            max_new_tokens=NUM_STEPS, pad_token_id=0, length_penalty=0.0, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
    assert [beam.tokens for beam in search.beams] == out.sequences.tolist()
    assert [beam.score for beam in search.beams] == pytest.approx(out.sequences_scores.tolist(), abs=1e-4)


async def test_beams_forks_and_others_in_one_batch(real: Harness) -> None:
    """Each as it is alone: a beam that requests candidates, a source, its fork, and a greedy sequence with logprobs."""
    prompt = [9, 8, 7, 6, 5]
    drawn = [
        types_pb2.SequenceSampling(temperature=1, top_p=1, repetition_penalty=1, seed=3, sample_index=i)
        for i in range(2)
    ]
    greedy = types_pb2.SequenceSampling(top_p=1, repetition_penalty=1, num_logprobs=1)
    stream, step = await first_step_id(real)
    together = await stream.step(
        step,
        admitted=[
            admit(4, prompt, [1], drawn[0]), admit(1, prompt, [1], drawn[1], num_computed_tokens=4),
            admit(2, prompt, [2], ASKING), admit(3, prompt, [3], greedy),
        ],
        scheduled=scheduled((4, 5, True), (2, 5, True), (3, 5, True)),
        forks=pb.SampleForks(source_slots=[4], slots=[1]),
    )  # fmt: skip
    assert list(together.slots) == [1, 2, 3, 4]
    assert list(together.num_tokens) == [1, 0, 1, 1]
    assert [item.slot for item in together.logprobs] == [3]
    stream.call.cancel()
    stream, step = await first_step_id(real)
    alone = {}
    for index, (slot, sampling) in enumerate(((4, drawn[0]), (1, drawn[1]), (2, ASKING), (3, greedy))):
        alone[slot] = await stream.step(
            step + index, admitted=[admit(slot, prompt, [slot], sampling)], scheduled=scheduled((slot, 5, True))
        )
    assert list(together.token_ids) == [alone[slot].token_ids[0] for slot in (1, 3, 4)]
    assert together.candidates[0] == alone[2].candidates[0]
    assert together.logprobs[0] == alone[3].logprobs[0]
    stream.call.cancel()
