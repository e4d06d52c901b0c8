"""Same row, same bits: logits do not depend on the batch, chunk borders, block size, block placement or history.

Over random histories, some the same in every run and some new in each. `test_exact_requests.py` checks the outputs of
whole requests.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoints import make_llama
from tests.executor_svc.cpu.kernels.bits import equal_bits
from tests.executor_svc.driver import Driver, Model, Tokens
from tests.helpers.fresh import fresh_seed
from tests.helpers.marks import short_and_long

# Those of real models are `wide` and `deep sums` only; the others are cheap and have awkward sizes.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "one KV head": {
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "hidden_size": 100,
        "tie_word_embeddings": True,
    },
    "no groups": {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 72, "attention_bias": True},
    "wide": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 1031,
        "initializer_range": 0.05,
    },
    "deep sums": {
        "hidden_size": 2304,
        "intermediate_size": 2560,
        "num_hidden_layers": 1,
        "num_attention_heads": 18,
        "num_key_value_heads": 6,
        "initializer_range": 0.03,
    },
}
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module", params=[(shape, dtype) for shape in SHAPES for dtype in DTYPES], ids=" ".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    shape, dtype = request.param
    folder = tmp_path_factory.mktemp("checkpoint")
    return Model(make_llama(folder, **SHAPES[shape]), dtype=dtype)


def draw_texts(rng: random.Random, vocabulary: int, number: int, longest: int) -> list[Tokens]:
    """Sequences of random tokens, of which some begin as another does."""
    texts: list[list[int]] = []
    for _ in range(number):
        begun = rng.choice(texts)[: rng.randrange(longest)] if texts and rng.random() < 0.5 else []
        length = max(len(begun) + 1, rng.randint(1, longest))
        texts.append(begun + [rng.randrange(vocabulary) for _ in range(length - len(begun))])
    return [Tokens(text) for text in texts]


def replay(model: Model, seed: int, num_sequences: int, longest: int, block_size: int) -> Counter[str]:
    """Compute random sequences in a random history and compare every row with the one computed alone.

    Some find their beginning in another's blocks, some are preempted, by recompute or by swap; returns how often.
    """
    rng = random.Random(seed)
    blocks = num_sequences * (longest // block_size + 2) + 4
    driver = model.driver(seed, block_size=block_size, num_gpu_blocks=blocks, num_cpu_blocks=blocks)
    sequences = draw_texts(rng, model.loaded.geometry.vocab_size, num_sequences, longest)
    expected = [model.whole(sequence.tokens) for sequence in sequences]
    happened: Counter[str] = Counter()
    while waiting := [i for i, s in enumerate(sequences) if s.num_computed < len(s.tokens)]:
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        chosen.sort() if rng.random() < 0.5 else None
        happened["hits"] += sum(begin_as_another(driver, rng, sequences, sequences[i]) for i in chosen)
        work = [(sequences[i], chunk_length(rng, sequences[i])) for i in chosen]
        before = [s.num_computed for s, _ in work]
        logits = "last" if rng.random() < 0.3 else "all"
        for i, (s, count), start, rows in zip(chosen, work, before, driver.step(work, logits), strict=True):
            assert bool(rows.isfinite().all()), "something unwritten was read"
            first = start + count - 1 if logits == "last" else start
            assert equal_bits(rows, expected[i][first : start + count]), (i, start, count, len(s.tokens), logits)
        victim = sequences[rng.choice(chosen)]
        if happened["recomputes"] < 2 and rng.random() < 0.2:  # its blocks hold garbage for the next owner
            driver.release(victim)
            happened["recomputes"] += 1
        elif rng.random() < 0.3:
            driver.swap(victim)
            happened["swaps"] += 1
    return happened


def begin_as_another(driver: Driver, rng: random.Random, sequences: list[Tokens], target: Tokens) -> bool:
    """Mostly take over what another has computed, if this one has nothing yet; returns whether there was any."""
    source = rng.choice(sequences)
    if target.blocks or source is target or rng.random() < 0.3:
        return False
    driver.share(source, target)
    return target.num_computed > 0


def chunk_length(rng: random.Random, sequence: Tokens) -> int:
    """Return a decode, a short chunk, or anything up to all that is left."""
    left = len(sequence.tokens) - sequence.num_computed
    return min(left, rng.choice((1, 1, rng.randint(1, 20), rng.randint(1, left))))


def is_slow(model: Model) -> bool:
    return model.loaded.geometry.hidden_size > 2000


@pytest.mark.sampled(3)
@pytest.mark.parametrize("block_size", short_and_long([8, 32], [8]))
def test_random_histories(model: Model, block_size: int) -> None:
    longest = 70 if is_slow(model) else 160
    replay(model, 100 * block_size, num_sequences=5, longest=longest, block_size=block_size)


@pytest.mark.sampled(2)
def test_one_by_one_is_one_chunk(model: Model) -> None:
    length = 70 if is_slow(model) else 140
    tokens = [(7 * i * i + 3) % model.loaded.geometry.vocab_size for i in range(length)]
    expected = model.whole(tokens)
    driver, sequence = model.driver(block_size=8), Tokens(tokens)
    for position in range(len(tokens)):
        (row,) = driver.step([(sequence, 1)])
        assert equal_bits(row, expected[position : position + 1]), position


@pytest.mark.sampled(4)
def test_many_rows_and_few(model: Model) -> None:
    """Decodes in batches of 1 to 70 sequences."""
    rng = random.Random(5)
    vocabulary = model.loaded.geometry.vocab_size
    texts = [[rng.randrange(vocabulary) for _ in range(rng.randint(2, 30))] for _ in range(70)]
    expected = [model.whole(text)[-1:] for text in texts]
    for size in (1, 2, 17, 70) if is_slow(model) else (1, 2, 3, 5, 8, 17, 33, 70):
        driver = model.driver(size, num_gpu_blocks=160)
        sequences = [Tokens(text) for text in texts[:size]]
        driver.step([(s, len(s.tokens) - 1) for s in sequences], "last")
        rows = driver.step([(s, 1) for s in sequences], "last")
        assert all(equal_bits(*pair) for pair in zip(rows, expected, strict=False)), size


@pytest.fixture(scope="module", params=DTYPES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("tiny")
    sizes = {"hidden_size": 42, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20}
    return Model(make_llama(folder, **sizes), dtype=request.param)


histories = given(
    seed=st.integers(0, 2**32 - 1),
    num_sequences=st.integers(1, 6),
    longest=st.integers(1, 150),
    block_size=st.sampled_from([8, 16, 32, 64]),
)


@settings(max_examples=10)
@histories
def test_any_history(tiny: Model, seed: int, num_sequences: int, longest: int, block_size: int) -> None:
    replay(tiny, seed, num_sequences, longest, block_size)


@settings(max_examples=6, derandomize=False, database=None)
@histories
def test_histories_that_no_run_had_before(
    tiny: Model, seed: int, num_sequences: int, longest: int, block_size: int
) -> None:
    """Hypothesis prints what fails, and a line that repeats it."""
    replay(tiny, seed, num_sequences, longest, block_size)


@pytest.mark.sampled(2)
def test_new_histories_of_every_shape(model: Model) -> None:
    rng = random.Random(fresh_seed())
    longest = 60 if is_slow(model) else 200
    replay(model, rng.getrandbits(32), rng.randint(2, 6), longest, rng.choice([8, 16, 32, 64]))


def test_histories_have_something_of_everything(tiny: Model) -> None:
    happened = sum((replay(tiny, seed, 5, 120, 8) for seed in range(8)), Counter[str]())
    assert min(happened[name] for name in ("hits", "recomputes", "swaps")) > 2


def test_sizes_of_memory_do_not_show(tiny: Model) -> None:
    """How long sequences may become, how large steps, and how many rows of logits are made at once."""
    tokens = [(5 * i * i + 1) % tiny.loaded.geometry.vocab_size for i in range(100)]
    expected = tiny.whole(tokens)
    for sizes in (
        {"max_model_len": 100, "max_num_batched_tokens": 100, "max_num_seqs": 1},
        {"max_model_len": 257, "max_num_batched_tokens": 500, "max_num_seqs": 100},
    ):
        other = Model(Path(tiny.options["model"]), **{**tiny.options, **sizes})
        assert equal_bits(other.whole(tokens), expected)


@pytest.mark.parametrize(("dtype", "num_threads"), [("float32", 2), ("bfloat16", 3)])
def test_several_threads(tmp_path: Path, dtype: str, num_threads: int) -> None:
    """Who computes what depends on who is free: that must not show either."""
    folder = make_llama(tmp_path, **{**SHAPES["wide"], "intermediate_size": 1001, "num_hidden_layers": 1})
    tokens = list(range(1, 200))
    expected = Model(folder, dtype=dtype).whole(tokens)
    before = torch.get_num_threads()
    try:
        model = Model(folder, dtype=dtype, num_threads=num_threads)
        replay(model, num_threads, num_sequences=4, longest=120, block_size=16)
        assert equal_bits(model.whole(tokens), expected)
    finally:
        torch.set_num_threads(before)


def test_the_comparison_sees_a_small_difference(tiny: Model) -> None:
    """Change cached values of one token a little: the logits of a later one must differ, or this proves nothing."""
    tokens = list(range(1, 60))
    driver, sequence = tiny.driver(), Tokens(tokens)
    driver.step([(sequence, 58)])
    values = driver.cache.layers[0][sequence.blocks[0], 1, :, 3]
    if values.dtype == torch.float32:
        values[0, :1].view(torch.int32).bitwise_xor_(1 << 12)
    else:
        values.view(torch.int16).bitwise_xor_(1 << 4)
    (row,) = driver.step([(sequence, 1)])
    assert not equal_bits(row, tiny.whole(tokens)[-1:])
