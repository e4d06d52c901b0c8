"""Models whose steps of few rows are computed by fused layers: the tokens of layers apart, in five launches a layer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from cadenza_common.plan.sampling import SequenceSampling
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.helpers.executor.plans import scheduled, sequence
from tests.helpers.executor.stepping import Stepper

pytestmark = pytest.mark.slow

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64},
    "qwen3": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64},
    "qwen2": {},
    "granite": {},
}
"""Groups of heads, norms of heads, biases, and a scale of the residual."""
PROMPTS = ([5, 9, 2], list(range(3, 40)), [7] * 20)
LAYER = {"skinny_kernel": 4, "new_keys_kernel": 1}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches by the kernel's name."""
    found: Counter[str] = Counter()
    run = InterpretedFunction.run

    def counted(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        found[self.fn.__name__] += 1
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    return found


def made(family: str, folder: Path) -> Path:
    sizes = {"vocab_size": 131, "num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 80}
    return make_checkpoint(folder, family, dtype=torch.bfloat16, **sizes, **SHAPES[family])


def steps_of(model: Model, launches: Counter[str]) -> tuple[list[list[int]], Counter[str]]:
    """Tokens of each step, and the launches of the last: prompts, then decodes of three, one of them drawn."""
    stepper, tokens = Stepper(model), []
    drawn = SequenceSampling(temperature=0.7, top_k=20, seed=3)
    sequences = [sequence(i, PROMPTS[i], stepper.blocks(i)) for i in (0, 1)]
    sequences.append(sequence(2, PROMPTS[2], stepper.blocks(2), sampling=drawn))
    counts = [(i, len(prompt), True) for i, prompt in enumerate(PROMPTS)]
    tokens.append(stepper.step(admitted=tuple(sequences), scheduled=scheduled(*counts)).token_ids.tolist())
    for _ in range(3):
        launches.clear()
        tokens.append(stepper.step(decode_ready=True).token_ids.tolist())
    return tokens, Counter(launches)


@pytest.mark.parametrize("family", SHAPES)
def test_tokens_are_those_of_layers_apart(family: str, tmp_path: Path, launches: Counter[str]) -> None:
    folder = made(family, tmp_path)
    expected, apart = steps_of(Model(folder, device="cuda"), launches)
    found, fused = steps_of(Model(folder, device="cuda", skinny_gemms="on"), launches)
    assert found == expected
    assert not apart.keys() & LAYER.keys()
    assert {name: fused[name] for name in LAYER} == {name: 2 * count for name, count in LAYER.items()}
    # All that the layers launched apart is gone, but the norm before the head.
    gone = {"_add_rms_norm", "rope_write_kv_kernel", "attention_kernel", "_gated", "_add"}
    assert gone <= apart.keys()
    assert not gone & fused.keys()
    assert fused["_rms_norm"] == fused["_square_rows"] == 1
    assert fused.total() - sum(2 * count for count in LAYER.values()) - 1 == _outside(apart)


def _outside(launches: Counter[str]) -> int:
    """Launches that are of no layer: all but six of each, of which the first norm is that of the first layer alone."""
    of_layers = {"_add_rms_norm", "rope_write_kv_kernel", "attention_kernel", "split_kernel", "_gated", "_add"}
    return sum(count for name, count in launches.items() if name not in of_layers) - 1
