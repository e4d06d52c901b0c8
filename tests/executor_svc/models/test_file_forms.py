"""Files of families with other names and orders than Llama's: what is read of them, whole and in parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.device.ranks import Share
from executor_svc.device.stored_linear import QuantBlock, QuantFormat
from executor_svc.models.files.checkpoint import SafetensorsWeights
from executor_svc.models.files.stored_names import decoder_names
from executor_svc.models.files.stored_order import QuantRowsByHead, row_order, rows_by_head
from executor_svc.models.folder import LoaderError
from executor_svc.models.parallel.source import RankSource
from executor_svc.models.parallel.split import spec_of
from executor_svc.models.specs.file_form import FileForm
from executor_svc.models.specs.spec import DecoderSpec, LearnedPositions
from executor_svc.models.weights.decoder_weights import DecoderWeights
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.models.test_parallel import logits_of
from tests.helpers.executor.rank_threads import RankThreads
from tests.helpers.models import peft_adapters
from tests.helpers.models.golden import random_prompts

CPU = torch.device("cpu")


class Builder:
    """As much of `models.base.Builder` as is needed."""

    torch_device, dtype, kernels = CPU, torch.float32, CpuKernels()


def weights_of(folder: Path, spec: DecoderSpec | None = None) -> SafetensorsWeights:
    return SafetensorsWeights(folder, torch.float32, CPU, spec=spec or peft_adapters.spec_of(folder))


def test_rows_of_grouped_heads() -> None:
    """Four query heads of two rows, two KV heads: q q k v, q q k v."""
    spec = replace(base_spec(), num_heads=4, num_kv_heads=2, head_size=2)
    assert row_order(rows_by_head(spec)).tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    spec = replace(spec, num_kv_heads=1)
    assert row_order(rows_by_head(spec)).tolist() == list(range(12)), "of one KV head nothing changes places"


def base_spec() -> DecoderSpec:
    from executor_svc.models.families.llama import read_llama
    from tests.executor_svc.models.model_configs import SIZES

    return read_llama(SIZES)


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize(("family", "fields"), [("gpt2", {}), ("gpt_neox", {}), ("falcon", {"num_kv_heads": 2})])
def test_parts_of_ranks_are_those_of_the_whole(tmp_path: Path, family: str, fields: dict[str, Any], rows: int) -> None:
    """Rows of q, k, v and their biases, columns of the output: in blocks, as of the whole tensor in memory."""
    fields = fields and {"new_decoder_architecture": True, **fields}
    folder = make_checkpoint(tmp_path, family, **fields)
    spec = peft_adapters.spec_of(folder)
    qkv, output = (f"model.layers.1.{name}" for name in (spec.names.qkv[0], spec.names.output))
    shape = ((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size, spec.hidden_size)
    whole = {f"{qkv}.weight": shape, f"{qkv}.bias": shape[:1], f"{output}.weight": (spec.hidden_size,) * 2}
    for rank in range(2):
        share = Share(rank, 2)
        source = RankSource(weights_of(folder), spec, share)
        in_memory = RankSource(InMemory(weights_of(folder)), spec, share)  # type: ignore[arg-type]
        own = spec_of(spec, share)
        part = (own.num_heads + 2 * own.num_kv_heads) * own.head_size
        for name, size in whole.items():
            mine = (size[0], size[1] // 2) if name.startswith(output) else (part, *size[1:])
            expected = in_memory.open(name, mine).whole()
            found = torch.cat([block.clone() for block in source.open(name, mine).blocks(rows)])
            assert torch.equal(found, expected)
            assert torch.equal(source.open(name, mine).whole(), expected)


class InMemory:
    """A source that is no `PartSource`: parts are cut in memory."""

    def __init__(self, source: SafetensorsWeights) -> None:
        self.open, self.open_linear, self.get = source.open, source.open_linear, source.get


def test_the_files_of_the_hub_have_no_words_before_their_names(tmp_path: Path) -> None:
    """And masks, which are no weights."""
    folder = make_checkpoint(tmp_path, "gpt2")
    (prompt,) = random_prompts(131, (30,))
    expected = Model(folder).whole(prompt)
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(folder / "model.safetensors").items()
    }
    assert "h.1.attn.c_attn.weight" in tensors
    tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8).tril() for layer in range(2)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(Model(folder).whole(prompt), expected)
    tensors["h.1.attn.q_norm.weight"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoaderError, match=r"1 tensors that the model does not use: h[.]1[.]attn[.]q_norm"):
        Model(folder)


def test_errors_name_tensors_as_files_of_the_family_do(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gpt_neox")
    tensors = load_file(folder / "model.safetensors")
    del tensors["gpt_neox.layers.1.attention.dense.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoaderError, match=r"tensor gpt_neox[.]layers[.]1[.]attention[.]dense[.]weight is missing"):
        Model(folder)


@pytest.mark.parametrize("head", ["embed_out", "lm_head"])
def test_a_head_of_either_name(head: str) -> None:
    form = FileForm(before="gpt_neox.", table="embed_in", norm="final_layer_norm", head="embed_out")
    stored = ["gpt_neox.layers.0.input_layernorm.weight", "gpt_neox.embed_in.weight", f"{head}.weight"]
    assert list(decoder_names(stored, form=form)) == [
        "model.layers.0.input_layernorm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_saved_in_few_bits_it_is_the_same_model(tmp_path: Path, family: str) -> None:
    """The folder that is written has Cadenza's names, and its order; two ranks compute what one does."""
    shape = {"n_embd": 128, "n_inner": 256} if family == "gpt2" else {"hidden_size": 128, "intermediate_size": 256}
    folder, saved = make_checkpoint(tmp_path / "dense", family, **shape), tmp_path / "saved"
    (prompt,) = random_prompts(131, (50,))
    whole = Model(folder, quantization="int8", save_quantized=str(saved)).whole(prompt)
    assert torch.equal(Model(saved).whole(prompt), whole)
    for each, options in ((folder, {"quantization": "int8"}), (saved, {})):
        halves = logits_of(RankThreads(each, 2, {"dtype": "float32", **options}), prompt)
        torch.testing.assert_close(halves, whole, rtol=0, atol=2e-3 * float(whole.abs().max()))


class FewBits:
    """Implements `QuantRows`."""

    column_order: Tensor | None = None
    whole_row_activations = False
    format = QuantFormat("four bits", 4, 32)

    def __init__(self, block: QuantBlock) -> None:
        self.block, self.shape = block, (len(block.codes), block.codes.shape[1])

    def blocks(self, num_bytes: int, multiple: int) -> Any:
        for start in range(0, len(self.block), 6):
            chosen = slice(start, start + 6)
            yield QuantBlock(
                self.block.codes[chosen], self.block.scales[chosen], zero_points=self.block.zero_points[chosen]
            )  # type: ignore[index]


def test_rows_in_few_bits_change_places_with_their_scales() -> None:
    spec = replace(base_spec(), num_heads=4, num_kv_heads=2, head_size=2)
    codes, points = (torch.randint(0, 16, (16, count), dtype=torch.uint8) for count in (64, 2))
    block, order = QuantBlock(codes, torch.randn(16, 2).half(), zero_points=points), row_order(rows_by_head(spec))
    found = list(QuantRowsByHead(FewBits(block), rows_by_head(spec)).blocks(5 * 64, 2))
    assert [len(each) for each in found] == [4, 4, 4, 4]
    for plane in ("codes", "scales", "zero_points"):
        assert torch.equal(torch.cat([getattr(each, plane) for each in found]), getattr(block, plane)[order])


def test_a_draft_may_run_beyond_its_positions(tmp_path: Path) -> None:
    """The last one counts there."""
    folder = make_checkpoint(tmp_path, "opt")
    spec = peft_adapters.spec_of(folder)
    assert spec.positions == LearnedPositions(512, 2)
    table = DecoderWeights(spec, weights_of(folder), Builder()).positions(600)  # type: ignore[arg-type]
    stored = load_file(folder / "model.safetensors")["model.decoder.embed_positions.weight"]
    assert table is not None
    assert torch.equal(table, torch.cat([stored[2:], stored[-1:].expand(88, -1)]))
