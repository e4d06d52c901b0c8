"""Models whose steps of few rows are computed by fused layers: the tokens of layers apart, in five launches a layer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.config import ExecutorConfig
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
    assert fused["_rms_norm"] == fused["square_rows_kernel"] == 1
    assert fused.total() - sum(2 * count for count in LAYER.values()) - 1 == _outside(apart)


def _outside(launches: Counter[str]) -> int:
    """Launches that are of no layer: all but six of each, of which the first norm is that of the first layer alone."""
    of_layers = {"_add_rms_norm", "rope_write_kv_kernel", "attention_kernel", "split_kernel", "_gated", "_add"}
    return sum(count for name, count in launches.items() if name not in of_layers) - 1


def states_of(folder: Path, skinny_gemms: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of a prompt of three tokens, and those before and behind its layers, side by side."""
    model = Model(folder, device="cuda", skinny_gemms=skinny_gemms)
    decoder: Any = model.loaded.model
    pools = model.device.new_kv_cache(model.loaded.geometry, ExecutorConfig(**model.options))
    (shape,), positions = decoder.attention_shapes, torch.arange(3)
    ropes, plan = decoder.new_ropes(positions), model.device.kernels.new_attention_plan(shape, 64, 16)
    decoder.fill_ropes(positions, torch.full((3,), 3), ropes)
    numbers = (torch.tensor(each, dtype=torch.int32) for each in ([0, 3], [3], [[1]]))
    plan.fill(torch.arange(3) + pools.layers[0].shape[3], *numbers)
    with torch.inference_mode():
        return decoder.forward_with_states(torch.tensor([5, 9, 2]), ropes, pools.layers, [plan], (0, 1, 2))


def test_states_between_layers_are_kept(tmp_path: Path, launches: Counter[str]) -> None:
    """As an EAGLE-3 head reads them; computed at once, without a recording."""
    folder = made("qwen3", tmp_path)
    expected, apart = states_of(folder, "off")
    launches.clear()
    found, fused = states_of(folder, "on")
    assert launches["new_keys_kernel"] == 2
    size = found.shape[1]
    assert torch.equal(fused[:, :size], apart[:, :size]), "embeddings"
    assert torch.equal(fused[:, 2 * size :], found)
    for each in range(3):
        ours, theirs = (states[:, each * size : (each + 1) * size].float() for states in (fused, apart))
        assert ((ours - theirs).norm(dim=1) <= 2**-6 * theirs.norm(dim=1)).all()
    assert torch.equal(apart[:, 2 * size :], expected)
