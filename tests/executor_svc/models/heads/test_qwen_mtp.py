"""The head of multi-token prediction in a Qwen3.5 checkpoint, against transformers' layer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.head_runner import CpuHeadRunner
from executor_svc.models.folder import LoaderError
from executor_svc.models.heads.draft import LoadedDraft
from executor_svc.models.heads.mtp import MtpHead
from executor_svc.models.heads.mtp_loading import check_mtp, has_mtp, load_mtp
from executor_svc.plan.limits import Limits
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model, flat_batch
from tests.executor_svc.models.heads.head_driver import random_tokens
from tests.helpers.models.gguf_files import all_of, dequantized, write_gguf
from tests.helpers.models.quantized_layouts import quantize_checkpoint
from tests.helpers.models.qwen_mtp import PREFIX, ReferenceQwenMtp, make_qwen_mtp, stacked
from tests.helpers.models.wrapped_text import wrap_text

OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 96, "max_num_seqs": 8, "block_size": 16}


ATTENDING = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
MIXTURES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_5_moe_text", ATTENDING),
    ("qwen3_next", {"num_layers": None}),
    ("qwen3_next", {"num_experts": 0}),
]


def config_of(folder: Path, **options: Any) -> ExecutorConfig:
    given = {"model": str(folder), "device": "cpu", "num_threads": 1, "speculative": "mtp", **OPTIONS, **options}
    return ExecutorConfig(**given)


def check(loaded: Path, reference: Path, **options: Any) -> LoadedDraft[MtpHead]:
    """Compare a head's results for a text, over any states, with those of transformers' layer."""
    assert has_mtp(config_of(loaded))
    model = Model(loaded, **{**OPTIONS, **options})
    config = config_of(loaded, **options)
    draft = load_mtp(config, model.device, model.loaded)
    hidden, generator = draft.model.hidden_size, torch.Generator().manual_seed(7)
    states, kept = torch.zeros(96, hidden), torch.randn(40, hidden, generator=generator)
    tokens = random_tokens(1, 40)
    (heads,) = draft.model.layer_heads
    kept_layer = torch.full(
        (16, 2, heads.num_kv_heads, 16, model.device.kernels.padded_head_size(heads.head_size)), torch.nan
    )
    pools: Any = SimpleNamespace(draft_layers=[kept_layer], draft_tables=())
    limits = Limits(8, 8, 96, 256, 131, 131, 16, 16, 0, 1)
    runner = CpuHeadRunner(draft.model, model.device, pools, limits, states)
    states[:40] = kept
    batch = flat_batch([(0, 40)], [[9, 2, 14]], 16, tokens)
    results = runner.forward(batch, runner.combine(40)).clone()
    expected, expected_logits = ReferenceQwenMtp(reference).forward(torch.tensor(tokens), kept)
    torch.testing.assert_close(results, expected, rtol=2e-4, atol=2e-4)
    for first in range(0, 40, 8):
        logits, best = runner.logits(results[first : first + 8])
        torch.testing.assert_close(logits, expected_logits[first : first + 8], rtol=2e-4, atol=2e-4)
        assert best.tolist() == logits.argmax(1).tolist()
    return draft


def check_count(draft: LoadedDraft[MtpHead], folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert draft.num_parameters == sum(each.numel() for key, each in tensors.items() if key.startswith(PREFIX))


@pytest.mark.parametrize("wrapped", [False, True])
def test_against_transformers(tmp_path: Path, wrapped: bool) -> None:
    """It reads states behind the final norm, and the embedding first; its layer has a gate."""
    folder = loaded = make_qwen_mtp(tmp_path / "text", "qwen3_5_text", seed=3)
    if wrapped:
        loaded = wrap_text(folder, tmp_path / "wrapped", "qwen3_5", "Qwen3_5ForConditionalGeneration")
    check_count(check(loaded, folder), folder)


@pytest.mark.parametrize(("family", "shape"), MIXTURES)
def test_with_experts(tmp_path: Path, family: str, shape: dict[str, Any]) -> None:
    """Its MLP is the target's mixture; Qwen3-Next's config.json does not say that there is a head."""
    folder = make_qwen_mtp(tmp_path, family, seed=3, **shape)
    check_count(check(folder, folder), folder)


def test_with_all_experts_in_one_tensor(tmp_path: Path) -> None:
    """As Qwen3.5 is published."""
    folder, fused = make_qwen_mtp(tmp_path / "made", "qwen3_5_moe_text", seed=3, **ATTENDING), tmp_path / "fused"
    wrap_text(folder, fused, "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration")
    tensors = load_file(fused / "model.safetensors")
    of_layer = {name.removeprefix("mtp.layers.0."): name for name in tensors if name.startswith("mtp.layers.0.")}
    together = stacked({own: tensors.pop(name) for own, name in of_layer.items()})
    assert together["mlp.experts.down_proj"].ndim == 3
    tensors |= {f"mtp.layers.0.{name}": tensor for name, tensor in together.items()}
    save_file(tensors, fused / "model.safetensors", {"format": "pt"})
    check_count(check(fused, folder), folder)


WIDE = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}


@pytest.mark.parametrize("layout", ["gptq", "w4a16"])
def test_in_few_bits(tmp_path: Path, layout: str) -> None:
    """As the other linears."""
    folder, quantized, dense = (tmp_path / name for name in ("made", "quantized", "dense"))
    make_qwen_mtp(folder, "qwen3_next", seed=3, **WIDE, mlp_only_layers=[])
    quantize_checkpoint(folder, layout, quantized, dense)
    check(quantized, dense, quantized_activations="off", dtype="float32")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3_5_delta", Type.Q8_0), ("qwen3_5_moe_text", Type.Q4_0), ("qwen3_next_delta", Type.F32)]
)
def test_from_gguf(tmp_path: Path, family: str, kind: Type) -> None:
    """Where llama.cpp's converter puts it: in a layer behind the others, its norms with 1 added."""
    shape: dict[str, Any] = {"attention_bias": False, "linear_value_head_dim": 32, **WIDE}
    shape |= {"intermediate_size": 64} | ({"mlp_only_layers": []} if "next" in family else {})
    folder = make_qwen_mtp(tmp_path / "made", family, seed=3, **shape)
    file = write_gguf(folder, tmp_path / "model.gguf", all_of(kind))
    reference = dequantized(folder, tmp_path / "dequantized", all_of(kind))
    check(file, reference, dtype="float32", quantized_activations="off")


def test_which_have_one(tmp_path: Path) -> None:
    folder = make_qwen_mtp(tmp_path, "qwen3_5_delta")
    assert has_mtp(config_of(folder))
    path = folder / "model.safetensors"
    left = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(PREFIX)}
    save_file(left, path, {"format": "pt"})
    assert not has_mtp(config_of(folder)), "a config that names one is not enough"


def test_files_without_one(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "made", "qwen3_5_delta", attention_bias=False)
    file = write_gguf(folder, tmp_path / "model.gguf", all_of(Type.F32))
    for path, found in ((folder, "mtp_num_hidden_layers is not in config.json"), (file, "nextn_predict_layers is ")):
        with pytest.raises(LoaderError, match=rf"^--speculative mtp: {path} has no MTP head \({found}"):
            check_mtp(config_of(path))
        assert not has_mtp(config_of(path))


def test_only_of_one_layer(tmp_path: Path) -> None:
    folder = make_qwen_mtp(tmp_path, "qwen3_5_delta", num_layers=2)
    with pytest.raises(LoaderError, match="mtp_num_hidden_layers is 2: only heads of 1 layer are supported"):
        check_mtp(config_of(folder))
    assert not has_mtp(config_of(folder))
