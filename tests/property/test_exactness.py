"""Same row, same bits: logits do not depend on the batch, chunk borders, block size, block placement or history."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.checkpoints import make_llama
from tests.kernels.driver import Model, Tokens

# Real tiles of oneDNN and MKL are crossed by `wide` only; the others are cheap and have awkward sizes.
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


def equal_bits(left: Tensor, right: Tensor) -> bool:
    """Compare as integers, so that NaN equals NaN and 0 is not -0."""
    return left.shape == right.shape and torch.equal(left.view(torch.int32), right.view(torch.int32))


def replay(model: Model, seed: int, num_sequences: int, longest: int, block_size: int) -> None:
    """Compute random sequences in a random history and compare every row with the one computed alone."""
    rng = random.Random(seed)
    vocabulary = model.loaded.geometry.vocab_size
    driver = model.driver(seed, block_size=block_size, num_gpu_blocks=num_sequences * (longest // block_size + 1) + 4)
    sequences = [
        Tokens([rng.randrange(vocabulary) for _ in range(rng.randint(1, longest))]) for _ in range(num_sequences)
    ]
    expected = [model.whole(sequence.tokens) for sequence in sequences]
    restarts = 1
    while waiting := [i for i, s in enumerate(sequences) if s.num_computed < len(s.tokens)]:
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        chosen.sort() if rng.random() < 0.5 else None
        work = [(sequences[i], chunk_length(rng, sequences[i])) for i in chosen]
        before = [s.num_computed for s, _ in work]
        logits = "last" if rng.random() < 0.3 else "all"
        for i, (s, count), start, rows in zip(chosen, work, before, driver.step(work, logits), strict=True):
            assert bool(rows.isfinite().all()), "something unwritten was read"
            first = start + count - 1 if logits == "last" else start
            assert equal_bits(rows, expected[i][first : start + count]), (i, start, count, len(s.tokens), logits)
        if restarts and rng.random() < 0.1:  # preempted by recompute: its blocks hold garbage for the next owner
            restarts -= 1
            driver.release(sequences[rng.choice(chosen)])


def chunk_length(rng: random.Random, sequence: Tokens) -> int:
    """Return a decode, a short chunk, or anything up to all that is left."""
    left = len(sequence.tokens) - sequence.num_computed
    return min(left, rng.choice((1, 1, rng.randint(1, 20), rng.randint(1, left))))


def is_slow(model: Model) -> bool:
    return model.loaded.geometry.hidden_size > 2000


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_random_histories(model: Model, block_size: int) -> None:
    longest, repeats = (70, 1) if is_slow(model) else (200, 2)
    for seed in range(repeats):
        replay(model, 100 * block_size + seed, num_sequences=4, longest=longest, block_size=block_size)


def test_one_by_one_is_one_chunk(model: Model) -> None:
    length = 70 if is_slow(model) else 140
    tokens = [(7 * i * i + 3) % model.loaded.geometry.vocab_size for i in range(length)]
    expected = model.whole(tokens)
    driver, sequence = model.driver(block_size=8), Tokens(tokens)
    for position in range(len(tokens)):
        (row,) = driver.step([(sequence, 1)])
        assert equal_bits(row, expected[position : position + 1]), position


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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(
        make_llama(
            tmp_path_factory.mktemp("tiny"), hidden_size=42, num_attention_heads=6, num_key_value_heads=2, head_dim=20
        )
    )


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_sequences=st.integers(1, 6),
    longest=st.integers(1, 150),
    block_size=st.sampled_from([8, 16, 32, 64]),
)
def test_any_history(tiny: Model, seed: int, num_sequences: int, longest: int, block_size: int) -> None:
    replay(tiny, seed, num_sequences, longest, block_size)


THREADS_SCRIPT = """
import sys, pathlib
from tests.checkpoints import make_llama
from tests.kernels.driver import Model
from tests.property.test_exactness import SHAPES, replay
folder = make_llama(pathlib.Path(sys.argv[1]), **{**SHAPES["wide"], "intermediate_size": 1001, "num_hidden_layers": 1})
for dtype in ("float32", "bfloat16"):
    for num_threads in (2, 3):
        model = Model(folder, dtype=dtype, num_threads=num_threads)
        replay(model, num_threads, num_sequences=5, longest=200, block_size=16)
"""


def test_several_threads(tmp_path: Path) -> None:
    """Where a tensor is cut among threads depends on its size: that must not show either."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", THREADS_SCRIPT, str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr


def test_the_comparison_sees_a_small_difference(tiny: Model) -> None:
    """Change one cached value by 1 in 2000: the logits of a later token must differ, or these tests prove nothing."""
    tokens = list(range(1, 60))
    driver, sequence = tiny.driver(), Tokens(tokens)
    driver.step([(sequence, 58)])
    value = driver.cache.layers[0][sequence.blocks[0], 1, 0, 3]
    value[:1].view(torch.int32).bitwise_xor_(1 << 12)
    (row,) = driver.step([(sequence, 1)])
    assert not equal_bits(row, tiny.whole(tokens)[-1:])
