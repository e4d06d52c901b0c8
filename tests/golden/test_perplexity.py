"""What few bits cost: the perplexity of the demo model on the texts of its world, by how weights and activations are.

The bounds are stated in docs/quantization.md.
"""

from __future__ import annotations

import importlib
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from tokenizers import Tokenizer

from tests.executor_svc.driver import Model
from tests.helpers.marks import short_and_long
from tests.helpers.paths import ROOT

MODELS = ROOT / "models"
CHECKPOINT = MODELS / "cadenza-demo"
NUM_TEXTS, SEED = 120, 20261124
BOUNDS = {("int8", "off"): 1.001, ("int8", "int8"): 1.001, ("int4", "off"): 1.005, ("int4", "int8"): 1.005}
"""The most perplexity over that of the dense model, by --quantization and --quantized-activations."""


@dataclass(frozen=True)
class Text:
    """A conversation of the demo model's world, drawn anew."""

    tokens: list[int]
    learned: list[bool]
    """Whether the token is one that the model learned to write: an answer's, not a question's."""


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    sys.path.insert(0, str(MODELS))
    try:
        data = importlib.import_module("demo_data")
    finally:
        sys.path.remove(str(MODELS))
    renderer, draw = data.Renderer(Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))), random.Random(SEED)
    rendered = [renderer.render(data.training_conversation(draw)) for _ in range(NUM_TEXTS)]
    found = [Text(tokens[:512], [weight > 0 for weight in weights[:512]]) for tokens, weights in rendered]
    assert sum(sum(text.learned) for text in found) > 2000
    return found


def perplexity(texts: list[Text], **options: str) -> float:
    model = Model(CHECKPOINT, dtype="bfloat16", **options)

    def losses() -> Iterator[torch.Tensor]:
        for text in texts:
            logits = model.whole(text.tokens)[:-1].double()
            every = torch.nn.functional.cross_entropy(logits, torch.tensor(text.tokens[1:]), reduction="none")
            yield every[torch.tensor(text.learned[1:])]

    return math.exp(float(torch.cat(list(losses())).mean()))


@pytest.fixture(scope="module")
def dense(texts: list[Text]) -> float:
    return perplexity(texts)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("weights", "activations"), short_and_long(BOUNDS, [("int8", "off"), ("int4", "int8")]))
def test_perplexity_stays_near_that_of_the_dense_model(
    texts: list[Text], dense: float, weights: str, activations: str
) -> None:
    found = perplexity(texts, quantization=weights, quantized_activations=activations)
    print(f"{weights}, activations {activations}: {found:.4f}, dense {dense:.4f}, ratio {found / dense:.5f}")
    assert 0.99 < found / dense < BOUNDS[weights, activations]
