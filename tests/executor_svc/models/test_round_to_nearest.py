"""`--quantization int8|int4` on the CPU: the numbers, the model that has them, and the options that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from executor_svc.config import ExecutorConfig
from executor_svc.device.dequantize import dequantize
from executor_svc.device.interface import DeviceError
from executor_svc.models.loading import LoadedModel, LoaderError, load_model
from executor_svc.models.quantized.round_to_nearest import INT4, INT8, round_to_nearest
from executor_svc.startup.executors import make_device
from executor_svc.startup.fingerprint import fingerprint
from tests.checkpoints import make_checkpoint, make_llama
from tests.executor_svc.driver import Model
from tests.helpers.models.golden import compare, our_greedy, random_prompts, transformers_greedy, transformers_model

SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}


def in_numpy(weight: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """Return the numbers of weights [N, K] rounded to nearest, by the definition in docs/quantization.md."""
    groups = weight.reshape(len(weight), -1, 32)
    if bits == 8:
        scales = np.abs(groups).max(2) / np.float32(127)
    else:
        at = np.abs(groups).argmax(2)[..., None]
        scales = np.take_along_axis(groups, at, 2)[..., 0] / np.float32(-8)
    wide = scales.astype(np.float16).astype(np.float32)[..., None]
    with np.errstate(divide="ignore"):
        inverse = np.where(wide == 0, np.float32(0), np.float32(1) / wide)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    return (np.clip(np.rint(groups * inverse), low, high) * wide).reshape(weight.shape).astype(np.float32)


@pytest.mark.parametrize(("kind", "bits"), [(INT8, 8), (INT4, 4)])
def test_numbers_are_those_of_the_definition(kind: Any, bits: int) -> None:
    weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(bits))
    weight[0, :32] = 0
    weight[1, 3] = -weight[1].abs().max() * 3
    weight[2, 40] = weight[2].abs().max() * 3
    block = round_to_nearest(weight, kind)
    assert int(block.codes.max()) < 2**bits
    assert torch.equal(dequantize(block, kind), torch.from_numpy(in_numpy(weight.numpy(), bits)))
    assert torch.equal(dequantize(block, kind)[0, :32], torch.zeros(32))
    error = (dequantize(block, kind) - weight).abs().view(7, 3, 32).amax(2)
    # Half a step; of 4 bits the side without the largest magnitude ends one step earlier.
    assert bool((error <= block.scales.float().abs() * (0.51 if bits == 8 else 1.01)).all())


def dequantized(folder: Path, target: Path, quantization: str) -> Path:
    """Save a checkpoint of dense numbers that are those of the rounded weights."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.shape[1] % 32 == 0:
            is_table = name in ("lm_head.weight", "model.embed_tokens.weight")
            bits = 8 if quantization == "int8" or is_table else 4
            tensors[name] = torch.from_numpy(in_numpy(tensor.numpy(), bits))
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


CASES = [("llama", "int8", SHAPE), ("llama", "int4", SHAPE), ("qwen3", "int4", SHAPE), ("phi3", "int4", SHAPE)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "quantization", "shape"), CASES, ids=[f"{f} {q}" for f, q, _ in CASES])
def test_tokens_are_those_of_transformers_on_dequantized_weights(
    tmp_path: Path, family: str, quantization: str, shape: dict[str, Any]
) -> None:
    """Heads of qwen3 and its tied table: padded rows, padded columns of the output, one table for both ends."""
    folder = make_checkpoint(tmp_path / "dense", family, **shape)
    reference = transformers_model(dequantized(folder, tmp_path / "dequantized", quantization))
    prompts = random_prompts(131, (1, 17, 40))
    model = Model(folder, quantization=quantization, quantized_activations="off")
    continuations = our_greedy(model, prompts, 12)
    for prompt, ours in zip(prompts, continuations, strict=True):
        compare(ours, transformers_greedy(reference, prompt, 12), 1e-4)


def load(folder: Path, **options: Any) -> tuple[LoadedModel, bytes]:
    """Return the loaded model and its fingerprint."""
    config = ExecutorConfig(model=str(folder), num_threads=1, max_num_batched_tokens=64, num_gpu_blocks=4, **options)
    device = make_device(config)
    loaded = load_model(config, device)
    return loaded, fingerprint(loaded, device, device.new_kv_cache(loaded.geometry, config)).digest


@pytest.mark.slow
def test_fingerprints_name_the_rounding(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model", **SHAPE)
    prints = [load(folder, quantization=quantization)[1] for quantization in ("none", "int8", "int4")]
    assert len(set(prints)) == 3
    modes = [load(folder, quantization="int8", quantized_activations=mode)[1] for mode in ("off", "int8")]
    assert len(set(modes)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_are_those_of_codes_and_scales(tmp_path: Path, tied: bool) -> None:
    """All sizes are whole panels: nothing is padded."""
    folder = make_llama(tmp_path / "model", vocab_size=128, tie_word_embeddings=tied, **SHAPE)
    for quantization, bits in (("int8", 8.5), ("int4", 4.5)):
        geometry = load(folder, quantization=quantization)[0].geometry
        tables = (1 if tied else 2) * 128 * 64
        norms = 5 * 64
        linears = geometry.num_parameters - tables - norms
        assert geometry.weight_bytes == int(linears * bits / 8 + tables * 8.5 / 8) + norms * 4


@pytest.mark.slow
def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model", **SHAPE)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5, 7] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoaderError, match=r"int4: model\.layers\.1\.mlp\.up_proj\.weight has NaN or huge numbers"):
        load(folder, quantization="int4")


@pytest.mark.slow
def test_a_model_too_large_for_memory_is_measured_in_its_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some 95,000 numbers: 380 kB in float32, 60 to 110 kB in few bits, and rotary tables of 65 kB."""
    from executor_svc.cpu.device import CpuDevice

    folder = make_llama(tmp_path / "model", **SHAPE)
    monkeypatch.setattr(CpuDevice, "free_memory_bytes", lambda _: 250_000)
    with pytest.raises(LoaderError, match="250000 bytes of memory are free"):
        load(folder)
    load(folder, quantization="int8")
    load(folder, quantization="int4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "fp8"}, "--quantization fp8 is not possible on the CPU: it needs --device cuda"),
        ({"save_quantized": "/x"}, "--save-quantized /x: needs --quantization int8 or int4"),
    ],
)
def test_options_that_do_not_fit_the_cpu(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        make_device(ExecutorConfig(model="m", device="cpu", **options))


@pytest.mark.parametrize(
    "options", [{"quantization": "int4"}, {"quantized_activations": "int8"}, {"save_quantized": "/x"}]
)
def test_options_that_do_not_fit_a_gpu(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    ((name, value),) = options.items()
    with pytest.raises(DeviceError, match=f"--{name.replace('_', '-')} {value} is not possible on a GPU"):
        make_device(ExecutorConfig(model="m", device="cuda", **options))


@pytest.mark.slow
def test_quantized_activations_need_weights_in_few_bits(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model")
    with pytest.raises(LoaderError, match=r"--quantized-activations int8: the weights of .* are in float32"):
        load(folder, quantized_activations="int8")


@pytest.mark.slow
def test_models_of_transformers_are_not_rounded(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "gptj")
    with pytest.raises(LoaderError, match="--quantization int8: GPTJForCausalLM runs through transformers"):
        load(folder, quantization="int8", numerics="fast")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "quantization"), [("llama", "int8"), ("qwen3", "int4"), ("granite", "int4")])
def test_a_saved_model_is_the_model_that_was_quantized(tmp_path: Path, family: str, quantization: str) -> None:
    """Granite has biases; its feed-forward's 72 columns are no groups of 32, and stay dense."""
    shape = SHAPE | ({"intermediate_size": 72} if family == "granite" else {})
    folder = make_checkpoint(tmp_path / "dense", family, vocab_size=270, tokenizer=True, **shape)
    saved = tmp_path / "saved"
    first = Model(folder, quantization=quantization, save_quantized=str(saved), quantized_activations="off")
    again = Model(saved, quantized_activations="off")
    prompt = random_prompts(270, (30,))
    ((ours,), (theirs,)) = (our_greedy(model, prompt, 8) for model in (first, again))
    assert torch.equal(ours.logits, theirs.logits)
    assert ours.tokens == theirs.tokens
    assert {path.name for path in folder.glob("*token*")} <= {path.name for path in saved.iterdir()}
    assert not list(tmp_path.glob("*.partial"))
    with pytest.raises(LoaderError, match=r"--save-quantized .* it is there already"):
        load(folder, quantization=quantization, save_quantized=str(saved))
    with pytest.raises(LoaderError, match=r"--quantization int4: .* is in few bits already"):
        load(saved, quantization="int4")


@pytest.mark.slow
def test_saved_tensors_are_in_the_layout_of_compressed_tensors(tmp_path: Path) -> None:
    folder, saved = make_llama(tmp_path / "dense", **SHAPE), tmp_path / "saved"
    load(folder, quantization="int4", save_quantized=str(saved))
    tensors, dense = load_file(saved / "model.safetensors"), load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    packed, scale = tensors[f"{name}.weight_packed"].numpy().view(np.uint32), tensors[f"{name}.weight_scale"]
    codes = np.stack([packed >> (4 * place) & 15 for place in range(8)], 2).reshape(64, 96)
    numbers = (codes.astype(np.float32) - 8).reshape(64, 3, 32) * scale.numpy().astype(np.float32)[..., None]
    assert np.array_equal(numbers.reshape(64, 96), in_numpy(dense[f"{name}.weight"].numpy(), 4))
    assert tensors[f"{name}.weight_shape"].tolist() == [64, 96]
    assert torch.equal(tensors["model.norm.weight"], dense["model.norm.weight"])
