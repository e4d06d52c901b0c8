"""How weights in few bits are multiplied, by the number of rows: the usual ways, and what a start finds."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.device.dequantize import dequantize
from executor_svc.device.stored_linear import FewBits, StoredLinear
from executor_svc.gpu.choices.few_bits import FewBitsChoices, FewBitsProduct, FewBitsWay, FewBitsWays
from executor_svc.gpu.choices.ways import KernelCheck, KernelChecks, KernelError
from executor_svc.gpu.device import GpuDevice
from executor_svc.gpu.expert_linear import StackedExperts
from executor_svc.gpu.kernels.experts.blocks import RowBlocks
from executor_svc.gpu.linear import SumsWorkspace
from executor_svc.gpu.stored_linear import GpuStoredLinear
from executor_svc.startup.fingerprint import fingerprint
from tests.checkpoints import make_checkpoint
from tests.executor_svc.cpu.kernels.quantized.formats import Q4_K, random_block
from tests.executor_svc.cpu.kernels.quantized.formats_in_memory import BlockRows
from tests.executor_svc.driver import Model
from tests.helpers.models.quantized_layouts import quantize_checkpoint

COLUMNS, FEATURES, SMS = 1280, 96, 132


@dataclass(slots=True)
class TimedChecks(KernelChecks):
    """Takes the last of the ways that are right, as if it were the fastest."""

    names: list[str] = field(default_factory=list)

    def choose(self, check: KernelCheck) -> str:
        assert check.timed
        expected, right = check.expected(), []
        for way in check.ways:
            if self.reason_against(check.name, way, expected, check.tolerance) is None:
                right.append(way.name)
        self.names.append(f"{check.name}: {', '.join(right)}")
        return right[-1]


def choices_of(device: torch.device, arch: int = 90) -> tuple[FewBitsChoices, GpuStoredLinear, Tensor]:
    """Return choices, a linear of a weight that they are for, with its columns in another order, and its numbers."""
    workspace = SumsWorkspace(device)
    choices = FewBitsChoices(workspace, arch, SMS)
    block = random_block(Q4_K, FEATURES, COLUMNS, seed=3)
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))
    weight = StoredLinear([BlockRows(Q4_K, block, order)], torch.bfloat16)
    linear = GpuStoredLinear("down", weight, None, workspace, FewBits(), choices=choices)
    numbers = torch.empty(FEATURES, COLUMNS, dtype=torch.float64)
    numbers[:, order] = dequantize(block, Q4_K).to(torch.bfloat16).double()
    return choices, linear, numbers.to(device)


def test_usually_the_number_of_rows_decides() -> None:
    ways = FewBitsWays()
    assert {rows: ways.of(rows) for rows in (1, 16, 128, 129, 2048)} == {
        1: "tiles", 16: "tiles", 128: "tiles", 129: "widened", 2048: "widened",
    }  # fmt: skip
    assert ExecutorConfig(model="any").few_bits_products == "by-rows"


def test_every_way_is_right_and_the_fastest_is_taken(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    choices, linear, numbers = choices_of(device)
    checks = TimedChecks(device)
    with caplog.at_level(logging.INFO):
        found = choices.choose(checks, 40)
    assert found == (f"Q4_K {COLUMNS} to {FEATURES}: 32: all rows, 64: all rows",)
    assert f"products in few bits: Q4_K {COLUMNS} to {FEATURES}: rows up to 32: all rows, 64: all rows" in caplog.text
    shape = f"down Q4_K {COLUMNS} to {FEATURES} torch.bfloat16"
    assert checks.names == [f"{shape}, {rows} rows: tiles, widened, all rows" for rows in (32, 40)]
    # A shape is measured once.
    assert choices.choose(checks, 40) == found
    assert len(checks.names) == 2

    x = torch.randn(40, COLUMNS, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(device)
    expected = x.double() @ numbers.t()
    for rows in (16, 40):
        error = (linear(x[:rows], out_dtype=torch.float32).double() - expected[:rows]).norm() / expected[:rows].norm()
        assert error < (2**-8 if rows == 16 else 3e-5)


def test_linears_of_one_shape_have_one_choice(device: torch.device) -> None:
    choices, linear, _ = choices_of(device)
    (part,) = linear.parts
    assert choices.ways_of("other", part.weight, torch.bfloat16) is choices.ways_of("down", part.weight, torch.bfloat16)
    assert choices.ways_of("down", part.weight, torch.float16).chosen == {}


def test_before_hopper_there_are_no_programs_with_all_rows(device: torch.device) -> None:
    choices, linear, _ = choices_of(device, arch=80)
    checks = TimedChecks(device)
    choices.choose(checks, 33)
    assert linear.parts
    assert [name.rpartition(" rows: ")[2] for name in checks.names] == ["tiles, widened"] * 2


def test_experts_are_measured_in_blocks(device: torch.device) -> None:
    """Each of its rows is multiplied with its expert, by the way that was found."""
    workspace = SumsWorkspace(device)
    choices, blocks = FewBitsChoices(workspace, 90, SMS), [random_block(Q4_K, 70, 256, seed=seed) for seed in (1, 2)]
    weights = [StoredLinear([BlockRows(Q4_K, block, None)], torch.bfloat16) for block in blocks]
    made = [GpuStoredLinear("up", each, None, workspace, FewBits(), choices=choices) for each in weights]
    experts = StackedExperts([SimpleNamespace(linear=linear, in_features=256, out_features=70) for linear in made])
    del made
    checks = TimedChecks(device)
    assert choices.choose(checks, 40) == ("Q4_K 256 to 70 of 2 experts: 32: all rows, 64: all rows",)
    shape = "experts like up Q4_K 256 to 70 of 2 experts torch.bfloat16"
    assert checks.names == [f"{shape}, {rows} rows: tiles, all rows" for rows in (32, 64)]

    counts = 40, 33
    table = torch.tensor([[0, 0, 40, 0], [1, 40, 33, 0], [7, 7, 7, 7]], dtype=torch.int32, device=device)
    rows = RowBlocks(table, torch.tensor([2], dtype=torch.int32, device=device), 3, 64)
    x = torch.randn(73, 256, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(device)
    out = torch.zeros(73, 70, dtype=torch.float32, device=device)
    experts.multiply(x, out, rows, x, out, x)
    for some, found, block in zip(x.split(counts), out.split(counts), blocks, strict=True):
        expected = some.double() @ dequantize(block, Q4_K).to(torch.bfloat16).double().to(device).t()
        assert (found.double() - expected).norm() / expected.norm() < 3e-5


def test_a_way_that_is_wrong_is_not_taken(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without a right one the start is refused."""
    write, wrong = FewBitsProduct.write, {"all rows"}

    def broken(self: FewBitsProduct, way: FewBitsWay, x: Tensor, out: Tensor) -> None:
        write(self, way, x, out)
        if way in wrong:
            out[0, 0] += 1000

    monkeypatch.setattr(FewBitsProduct, "write", broken)
    choices, linear, _ = choices_of(device)
    assert choices.choose(TimedChecks(device), 20) == (f"Q4_K {COLUMNS} to {FEATURES}: 32: widened",)
    wrong |= {"tiles", "widened"}
    choices, linear, _ = choices_of(device)
    with pytest.raises(
        KernelError, match=r"down Q4_K .* 20 rows: no way is right on this GPU: tiles one number is off"
    ):
        choices.choose(KernelChecks(device), 20)
    assert linear.parts


def test_tokens_of_a_model_are_those_of_the_usual_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every position of a prompt of 70 tokens; the fingerprint says what was chosen."""
    shape = {"vocab_size": 131, "hidden_size": 128, "intermediate_size": 96, "head_dim": 64, "num_hidden_layers": 1}
    folder = make_checkpoint(tmp_path / "made", "llama", **shape)
    quantize_checkpoint(folder, "gptq with desc_act", tmp_path / "few bits", tmp_path / "dense")
    options = {"device": "cuda", "dtype": "bfloat16"}
    prompt = torch.randint(0, 131, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = Model(tmp_path / "few bits", **options).whole(prompt)
    model = Model(tmp_path / "few bits", few_bits_products="measured", **options)
    assert isinstance(model.device, GpuDevice)
    taken = []

    def all_rows(self: FewBitsWays, rows: int) -> FewBitsWay:
        taken.append(rows)
        return "all rows"

    monkeypatch.setattr(FewBitsWays, "of", all_rows)
    found = model.whole(prompt)
    cache = model.driver().cache
    usual = fingerprint(model.loaded, model.device, cache)
    model.device.few_bits.ways = ("GPTQ 128 to 128: 32: all rows",)
    assert fingerprint(model.loaded, model.device, cache).digest != usual.digest
    assert taken.count(70) >= 4
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert torch.allclose(found, expected, rtol=0.05, atol=0.05)
