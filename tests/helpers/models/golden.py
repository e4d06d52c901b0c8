"""Greedy continuations of transformers and of our model runner, and how they are compared."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.executor_svc.driver import Model, Tokens

CHUNK = 20
"""Prompt tokens of a sequence in a step at most: less than most prompts, and than their windows."""

TIE = 1e-4
"""Where tokens part, the two best logits must be closer than this share of the logits' scale."""


@dataclass(frozen=True)
class Continuation:
    """Tokens after a prompt, and the logits [tokens, vocabulary] fp32 that each was taken from."""

    tokens: list[int]
    logits: Tensor


def random_prompts(vocabulary: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(2, vocabulary) for _ in range(length)] for length in lengths]


def transformers_model(folder: Path, dtype: torch.dtype = torch.float32, experts: str | None = None) -> Any:
    """Return transformers' own model; experts: how it computes them, its default is of whole vectors alone."""
    from transformers import AutoModelForCausalLM

    how = {"attn_implementation": "eager", **({"experts_implementation": experts} if experts else {})}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **how).eval()


def transformers_greedy(reference: Any, prompt: list[int], new_tokens: int) -> Continuation:
    """Continue a prompt by transformers' generate, with its cache, past any EOS."""
    teacher_forced(reference, prompt[:1])  # lets go of the frequencies that a longer text left in dynamic embeddings
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return Continuation(out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float())


def teacher_forced(reference: Any, tokens: list[int]) -> Tensor:
    """Return transformers' logits [tokens, vocabulary] fp32 of a text computed at once."""
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor([tokens])).logits[0].float()
    return logits


def our_greedy(model: Model, prompts: list[list[int]], new_tokens: int) -> list[Continuation]:
    """Continue all prompts at once: in chunks, with late comers, decodes beside prefills."""
    driver = model.driver(gives_back=True, block_size=8)
    sequences = [Tokens(list(prompt), num_prompt=len(prompt)) for prompt in prompts]
    wanted = [len(prompt) + new_tokens for prompt in prompts]
    rows: list[list[Tensor]] = [[] for _ in prompts]
    step = 0
    while any(len(s.tokens) < end for s, end in zip(sequences, wanted, strict=True)):
        present = [i for i, s in enumerate(sequences) if i <= step and len(s.tokens) < wanted[i]]
        work = [(sequences[i], min(CHUNK, len(sequences[i].tokens) - sequences[i].num_computed)) for i in present]
        for i, logits in zip(present, driver.step(work, "last"), strict=True):
            if sequences[i].num_computed == len(sequences[i].tokens):
                rows[i].append(logits[-1])
                sequences[i].tokens.append(int(logits[-1].argmax()))
        step += 1
    return [Continuation(s.tokens[s.num_prompt :], torch.stack(row)) for s, row in zip(sequences, rows, strict=True)]


def compare(ours: Continuation, theirs: Continuation, close: float) -> int:
    """Check logits, within `close` of their scale, and tokens up to a tie; return how many tokens were equal."""
    scale = float(theirs.logits.abs().max())
    for i, (mine, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
        torch.testing.assert_close(ours.logits[i], theirs.logits[i], rtol=0, atol=close * scale)
        if mine != other:
            best = theirs.logits[i].topk(2).values
            assert best[0] - best[1] < TIE * scale, (i, mine, other)
            return i
    return len(ours.tokens)


def compare_greedy(ours: Continuation, reference: Any, prompt: list[int], close: float) -> int:
    """As `compare` with `transformers_greedy`; one step of transformers where it finds our tokens and logits right.

    Not for embeddings whose frequencies depend on the length of the text so far: in one step they have the last.
    """
    count = len(ours.tokens)
    logits = teacher_forced(reference, [*prompt, *ours.tokens[:-1]])[-count:]
    is_close = (ours.logits - logits).abs().max() <= close * logits.abs().max()
    if is_close and logits.argmax(-1).tolist() == ours.tokens:
        return count
    return compare(ours, transformers_greedy(reference, prompt, count), close)


def check_bits_of_chunks(model: Model) -> None:
    """A prompt of 70 and 40 tokens after it: at once, as after a preemption; in random chunks; and one by one."""
    (text,) = random_prompts(model.loaded.geometry.vocab_size, (110,))
    (whole,) = model.driver(block_size=32).step([(Tokens(text, num_prompt=70), 110)])
    rng = random.Random(3)
    for steps in (iter(lambda: rng.randint(1, 30), None), iter([33, 36, 1] + [1] * 40)):
        sequence, driver = Tokens(text, num_prompt=70), model.driver(block_size=8)
        beside = Tokens(list(reversed(text)), num_prompt=110)
        rows = []
        while sequence.num_computed < 110:
            work = [(sequence, min(next(steps), 110 - sequence.num_computed))]
            if beside.num_computed < 110:
                work.append((beside, 2))
            rows.append(driver.step(work)[0])
        assert torch.equal(torch.cat(rows).view(torch.int32), whole.view(torch.int32))


def check_bfloat16(
    folder: Path, prompt: list[int], *, median: bool = False, experts: str | None = None, **options: Any
) -> Model:
    """Our bf16 logits differ from transformers' fp32 ones by no more than its own bf16 logits do, or little more.

    median: that of rows counts, for rounding sends a few rows of a mixture to other experts. experts: as of
    `transformers_model`. Returns our model.
    """
    exact, rounded = (transformers_model(folder, dtype, experts) for dtype in (torch.float32, torch.bfloat16))
    wanted, theirs = teacher_forced(exact, prompt), teacher_forced(rounded, prompt)
    model = Model(folder, dtype="bfloat16", **options)
    (ours,) = model.driver().step([(Tokens(prompt, num_prompt=len(prompt)), len(prompt))])
    rows = ((found - wanted).square().mean(-1) for found in (theirs, ours))
    their_error, our_error = ((each.median() if median else each.mean()).sqrt() for each in rows)
    assert our_error <= 1.25 * their_error + 1e-3, (our_error, their_error)
    assert our_error < 0.1 * wanted.std()
    return model
