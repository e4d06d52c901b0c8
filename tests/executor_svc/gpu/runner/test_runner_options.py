"""The whole runner with 8-bit weights, activations, keys and values: what transformers gives with the same rounding."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.gpu.linear import Quantization
from executor_svc.models.through_transformers.linears import PreparedLinear
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.runner.quantized_reference import logprobs
from tests.helpers.executor.plans import scheduled, sequence
from tests.helpers.executor.stepping import Stepper
from tests.helpers.marks import short_and_long

pytestmark = pytest.mark.slow

F16 = torch.float16
VOCAB, LAYERS, KV_HEADS = 131, 2, 2
NUM_TOP = 6
"""Logprobs of each place: the interpreter takes long over each."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 64,
    "num_hidden_layers": LAYERS,
}
NOISE = 1.25
"""How far the runner may be from the reference in float32, as a share of how far the reference in its dtype is: what is
rounded there sends some numbers to the other side of a tie."""
PROMPT = list(range(3, 40))
UNSCALED = torch.ones(LAYERS, 2, KV_HEADS)
SCALES = torch.tensor([[[0.02, 1.7], [0.3, 40.0]], [[0.011, 0.9], [150.0, 0.05]]])
"""Some cut numbers off, some leave few of their digits: each of another layer, head or kind would be noticed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=F16, **SHAPE)


@dataclass(frozen=True)
class Scored:
    """A text and the logprobs [tokens - 1, vocabulary] after each of its tokens but the last; NaN: not reported."""

    tokens: list[int]
    logprobs: Tensor


def run(folder: Path, **options: Any) -> Scored:
    """Continue a prompt greedily: in two chunks beside another's decode, then decodes of both."""
    stepper = Stepper(Model(folder, device="cuda", **options))
    most_likely = SequenceSampling(num_logprobs=NUM_TOP, num_prompt_logprobs=NUM_TOP)
    first = sequence(0, [5, 9, 2], stepper.blocks(0))
    second = sequence(1, PROMPT, stepper.blocks(1), sampling=most_likely)
    results = [
        stepper.step(admitted=(first,), scheduled=scheduled((0, 3, True))),
        stepper.step(admitted=(second,), scheduled=scheduled((1, 20, False)), decode_ready=True),
        stepper.step(scheduled=scheduled((1, 17, True)), decode_ready=True),
        *(stepper.step(decode_ready=True) for _ in range(2)),
    ]
    assert any(bool(layer.float().isnan().any()) for layer in stepper.pools.layers), "what nobody wrote is NaN"
    tokens = [int(token) for result in results for token in np.array(result.token_ids)[np.array(result.slots) == 1]]
    rows = torch.full((len(PROMPT) + len(tokens) - 1, VOCAB), float("nan"))
    for part in (part for result in results for part in (*result.prompt_logprobs.values(), *result.logprobs.values())):
        ids = torch.tensor(part.top_token_ids).view(-1, NUM_TOP)
        values = torch.tensor(part.top_logprobs).view(-1, NUM_TOP)
        rows[part.start - 1 : part.start - 1 + len(ids)].scatter_(1, ids, values)
    return Scored(PROMPT + tokens, rows)


def rms(difference: Tensor) -> float:
    return float(difference.square().nanmean().sqrt())


def check(scored: Scored, folder: Path, dtype: torch.dtype, others: dict[str, Any], **meaning: Any) -> None:
    """Compare with transformers' model that rounds as the options mean, and see that one with others gives others."""
    assert len(scored.tokens) == len(PROMPT) + 3
    exact, rounded, other = (
        logprobs(folder, scored.tokens, **each)[:-1] for each in (meaning, {**meaning, "dtype": dtype}, others)
    )
    exact[scored.logprobs.isnan()] = torch.nan
    assert scored.logprobs.isfinite().sum(1).tolist() == [NUM_TOP] * len(exact)
    error, noise, effect = (rms(each - exact) for each in (scored.logprobs, rounded, other))
    assert error <= NOISE * noise, (error, noise)
    assert effect > NOISE * noise, "what the options change is lost in the noise"
    rows = scored.logprobs[len(PROMPT) - 1 :]
    assert rows.nan_to_num(-torch.inf).argmax(1).tolist() == scored.tokens[len(PROMPT) :]


@pytest.mark.parametrize("quantization", short_and_long(["int8", "fp8", "fp8_w8a8"], ["fp8_w8a8"]))
def test_quantization(quantization: Quantization, folder: Path) -> None:
    others: dict[str, Any] = {"quantization": "fp8"} if quantization == "fp8_w8a8" else {}
    check(run(folder, quantization=quantization), folder, F16, others, quantization=quantization)


def test_fp8_cache(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    check(run(folder, kv_cache_dtype="fp8"), folder, F16, {}, kv_scales=UNSCALED)
    assert warnings(caplog) == ["no layers"]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of how many layers have scales."""
    records = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert all("in fp8" in record.getMessage() for record in records)
    return [str(record.args[0]) for record in records if isinstance(record.args, tuple)]


def scaled(folder: Path, original: Path, scales: dict[str, Tensor]) -> Path:
    """A copy of a checkpoint that has these scales too."""
    folder.mkdir()
    (folder / "config.json").write_text((original / "config.json").read_text())
    tensors = load_file(original / "model.safetensors")
    save_file({**tensors, **scales}, folder / "model.safetensors")
    return folder


def test_scales_of_the_checkpoint(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scales = {
        f"model.layers.{layer}.self_attn.{name}": SCALES[layer, i].clone()
        for layer in range(LAYERS)
        for i, name in enumerate(("k_scale", "v_scale"))
    }
    scored = run(scaled(tmp_path / "model", folder, scales), kv_cache_dtype="fp8", dtype="bfloat16")
    check(scored, folder, torch.bfloat16, {"kv_scales": UNSCALED}, kv_scales=SCALES)
    assert warnings(caplog) == []


@pytest.mark.long
def test_scales_of_one_layer(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = scaled(tmp_path / "model", folder, {"model.layers.1.self_attn.kv_scale": torch.tensor(0.01)})
    expected = torch.tensor([1.0, 0.01])[:, None, None].expand(LAYERS, 2, KV_HEADS)
    check(run(own, kv_cache_dtype="fp8"), folder, F16, {"kv_scales": UNSCALED}, kv_scales=expected)
    assert warnings(caplog) == ["1 of 2 layers"]


@pytest.mark.parametrize(
    ("family", "layers", "quantization"),
    short_and_long([("codegen", 1, "int8"), ("codegen", 2, "fp8")], [("codegen", 1, "int8")]),
)
def test_models_of_transformers_are_quantized_too(
    family: str, layers: int, quantization: Quantization, tmp_path: Path
) -> None:
    """Whatever that does to their logits: the check when they are loaded is of attention alone."""
    folder = make_checkpoint(tmp_path, family, dtype=F16, n_layer=layers, num_hidden_layers=layers)
    model = Model(folder, device="cuda", quantization=quantization).loaded.model
    prepared = [part for part in model._model.modules() if isinstance(part, PreparedLinear)]
    assert len(prepared) == 4 * layers + 1


@pytest.mark.long
def test_scales_by_the_names_of_a_family(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the checkpoint says so: they are in its attention, whatever that is called."""
    original = make_checkpoint(tmp_path / "original", "gpt_neox", dtype=F16, num_key_value_heads=4)
    scales = torch.tensor([[0.02, 0.3], [0.011, 0.05]])
    named = {
        f"gpt_neox.layers.{layer}.attention.{name}": scales[layer, i].clone()
        for layer in range(LAYERS)
        for i, name in enumerate(("k_scale", "v_scale"))
    }
    own = scaled(tmp_path / "model", original, named)
    section = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    expected = scales[:, :, None].expand(LAYERS, 2, 4)
    check(run(own), original, F16, {"kv_scales": torch.ones(LAYERS, 2, 4)}, kv_scales=expected)
    assert warnings(caplog) == []
