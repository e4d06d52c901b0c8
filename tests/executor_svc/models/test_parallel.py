"""Models that are divided among ranks: transformers' logits, parts of weights, and what cannot be divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.device.ranks import Share
from executor_svc.device.stored_linear import QuantBlock, QuantFormat
from executor_svc.models.base import ModelConfigError
from executor_svc.models.files.checkpoint import SafetensorsWeights
from executor_svc.models.folder import LoaderError
from executor_svc.models.parallel.part import Part
from executor_svc.models.parallel.quant_part import QuantPart
from executor_svc.models.parallel.source import StoredPart
from executor_svc.models.parallel.split import check_split, part_of
from executor_svc.models.safetensors_file import StoredTensor
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.executor_svc.driver import Driver, Tokens
from tests.helpers.executor.rank_threads import RankThreads, on_ranks
from tests.helpers.marks import short_and_long
from tests.helpers.models.golden import random_prompts, teacher_forced, transformers_model
from tests.helpers.models.peft_adapters import spec_of

WITH_PARTS = (
    "cohere2",
    "gemma4_text",
    "llama4_text",
    "glm4",
    "granitemoehybrid",
    "apertus",
    "ministral3",
    "gpt2",
    "gpt_neox",
    "falcon",
    "opt",
    "phi",
    "granite_swa",
    "olmo2",
    "qwen3_5_text",
)
"""Of the newer families: layers and names unlike those of all others."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: make_checkpoint(tmp_path_factory.mktemp(family), family))


def logits_of(threads: RankThreads, tokens: list[int]) -> Tensor:
    """Return rank 0's logits of a text in three chunks."""

    def run(rank: int) -> Tensor:
        model = threads.models[rank]
        own = replace(model.loaded, geometry=model.loaded.own_geometry)
        driver = Driver(own, model.device, ExecutorConfig(**threads.options))
        sequence = Tokens(tokens, num_prompt=len(tokens))
        return torch.cat([driver.step([(sequence, count)])[0] for count in (20, 13, len(tokens) - 33)])

    return on_ranks(threads.size, run)[0]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    short_and_long([*FAMILIES, *WITH_PARTS], ["gemma2", "llama", "qwen2", "gemma4_text", "glm4", "qwen3_5_text"]),
)
def test_logits_are_those_of_transformers(checkpoint: Callable[[str], Path], family: str) -> None:
    """With as many KV heads as ranks, and with fewer; a vocabulary that no number of ranks divides."""
    folder = checkpoint(family)
    (tokens,) = random_prompts(131, (50,))
    expected = teacher_forced(transformers_model(folder), tokens)
    for size in (2, 4):
        found = logits_of(RankThreads(folder, size, {"dtype": "float32"}), tokens)
        assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("quantization", short_and_long(["int8", "int4"], ["int4"]))
def test_weights_in_few_bits_are_divided_where_their_groups_are(tmp_path: Path, quantization: str) -> None:
    """The same numbers as undivided, but for the order of sums; a rank's columns end where groups do."""
    folder = make_checkpoint(tmp_path, "llama", hidden_size=128, intermediate_size=256)
    (tokens,) = random_prompts(131, (50,))
    options = {"dtype": "float32", "quantization": quantization}
    whole, halves = (logits_of_size(folder, size, options, tokens) for size in (1, 2))
    torch.testing.assert_close(halves, whole, rtol=0, atol=1e-4 * float(whole.abs().max()))


def logits_of_size(folder: Path, size: int, options: dict[str, str], tokens: list[int]) -> Tensor:
    if size > 1:
        return logits_of(RankThreads(folder, size, dict(options)), tokens)
    from tests.executor_svc.driver import Model

    driver = Model(folder, **options, max_num_batched_tokens=512).driver()
    sequence = Tokens(tokens, num_prompt=len(tokens))
    return torch.cat([driver.step([(sequence, count)])[0] for count in (20, 13, len(tokens) - 33)])


class Whole:
    """A stored weight."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.shape = weight, tuple(weight.shape)

    def blocks(self, rows: int) -> Iterator[Tensor]:
        yield from self.weight.split(rows)

    def whole(self) -> Tensor:
        return self.weight


@pytest.mark.parametrize("rows", [1, 3, 5, 40])
def test_parts_of_stored_weights(rows: int) -> None:
    weight = torch.randn(20, 12)
    part = Part((range(2, 7), range(11, 13), range(19, 20)), False, 20)
    expected = torch.cat([weight[2:7], weight[11:13], weight[19:20]])
    blocks = [block.clone() for block in StoredPart(Whole(weight), part).blocks(rows)]
    assert torch.equal(torch.cat(blocks), expected)
    assert all(len(block) == rows for block in blocks[:-1])
    assert torch.equal(StoredPart(Whole(weight), part).whole(), expected)
    columns = StoredPart(Whole(weight), Part((range(3, 9),), True, 12))
    assert torch.equal(torch.cat(list(columns.blocks(rows))), weight[:, 3:9])
    assert torch.equal(columns.whole(), weight[:, 3:9])


class WholeInFewBits:
    """A weight in few bits."""

    column_order: Tensor | None = None
    whole_row_activations = False

    def __init__(self, kind: QuantFormat, block: QuantBlock) -> None:
        self.format, self.block, self.shape = kind, block, tuple(block.codes.shape)

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[QuantBlock]:
        for start in range(0, len(self.block), 4):
            yield QuantBlock(self.block.codes[start : start + 4], self.block.scales[start : start + 4])


def test_parts_of_weights_in_few_bits() -> None:
    kind = QuantFormat("four bits", 4, 32)
    block = QuantBlock(torch.randint(0, 16, (20, 128), dtype=torch.uint8), torch.randn(20, 4).half())
    stored = WholeInFewBits(kind, block)
    rows = QuantPart("up_proj", stored, Part((range(2, 7), range(11, 13)), False, 20))  # type: ignore[arg-type]
    blocks = list(rows.blocks(1, 2))
    assert [len(each) for each in blocks] == [2, 2, 2, 1]
    assert torch.equal(torch.cat([each.codes for each in blocks]), block.codes[[2, 3, 4, 5, 6, 11, 12]])
    assert torch.equal(torch.cat([each.scales for each in blocks]), block.scales[[2, 3, 4, 5, 6, 11, 12]])
    columns = QuantPart("down_proj", stored, Part((range(64, 128),), True, 128))  # type: ignore[arg-type]
    blocks = list(columns.blocks(1, 2))
    assert torch.equal(torch.cat([each.codes for each in blocks]), block.codes[:, 64:])
    assert torch.equal(torch.cat([each.scales for each in blocks]), block.scales[:, 2:])
    with pytest.raises(ModelConfigError, match=r"down_proj: four bits has a scale for 32 columns.* 48 of 128"):
        QuantPart("down_proj", stored, Part((range(48, 96),), True, 128))  # type: ignore[arg-type]
    stored.column_order = torch.arange(128)
    with pytest.raises(ModelConfigError, match=r"down_proj: .*act-order"):
        QuantPart("down_proj", stored, Part((range(64, 128),), True, 128))  # type: ignore[arg-type]


def test_parts_of_all_ranks_are_the_whole(checkpoint: Callable[[str], Path]) -> None:
    spec = spec_of(checkpoint("phi3"))
    names = ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj", "self_attn.o_proj", "lm_head")
    for name in names:
        parts = [part_of(f"model.layers.0.{name}", spec, Share(rank, 2)) for rank in range(2)]
        rows = sorted(row for part in parts if part is not None for each in part.ranges for row in each)
        assert rows == list(range(parts[0].total if parts[0] else 0))


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({"num_heads": 6, "num_kv_heads": 2}, 4, "num_attention_heads 6 cannot be divided among 4 ranks"),
        ({"intermediate_size": 73}, 2, "intermediate_size 73 cannot"),
        ({"num_heads": 6, "num_kv_heads": 3}, 2, "num_key_value_heads 3 can be neither divided among 2 ranks nor"),
    ],
)
def test_models_that_cannot_be_divided(
    checkpoint: Callable[[str], Path], change: dict[str, Any], size: int, message: str
) -> None:
    with pytest.raises(ModelConfigError, match=message):
        check_split(replace(spec_of(checkpoint("llama")), **change), size)


def test_a_rank_reads_its_part_of_a_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And has a digest of its own."""
    weight = torch.randn(40, 64)
    save_file({"a.weight": weight}, tmp_path / "model.safetensors")
    read = StoredTensor._read
    sizes: list[int] = []
    monkeypatch.setattr(StoredTensor, "_read", lambda *args: (sizes.append(args[2].nbytes), read(*args))[1])
    digests = set()
    for part, expected in (
        (Part((range(3, 9), range(20, 25)), False, 40), torch.cat([weight[3:9], weight[20:25]])),
        (Part((range(16, 32),), True, 64), weight[:, 16:32]),
    ):
        for rows in (4, 100):
            source = SafetensorsWeights(tmp_path, torch.float32, torch.device("cpu"))
            sizes.clear()
            stored = source.open_part("a.weight", (40, 64), part)
            assert torch.equal(torch.cat([block.clone() for block in stored.blocks(rows)]), expected)
            assert sum(sizes) == expected.numel() * 4
            assert source.num_parameters == weight.numel()
            assert torch.equal(stored.whole(), expected)
            digests.add(source.digest())
    assert len(digests) == 2
    with pytest.raises(LoaderError, match="shape"):
        source.open_part("a.weight", (40, 63), part)
