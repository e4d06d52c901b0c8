"""Adapters that peft made, on the GPU's path: logprobs of the CPU's, bits beside other adapters, steps without any."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpretedFunction

from cadenza_common.plan.result import StepResult
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.config import ExecutorConfig
from executor_svc.errors import StartError
from executor_svc.gpu import runner as gpu_runner
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.models.adapters.places import AdapterSizes
from executor_svc.speculation.ngram import NgramSource
from executor_svc.startup.adapters import adapter_sizes
from executor_svc.startup.build import build_model
from executor_svc.startup.executors import make_device
from executor_svc.worker.adapters import AdapterRefused
from executor_svc.worker.model_adapters import ModelAdapterLoader
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.models.adapters.test_adapted_models import OF_RECURRENT
from tests.helpers.executor.plans import ints, scheduled, sequence
from tests.helpers.executor.stepping import Stepper
from tests.helpers.marks import short_and_long
from tests.helpers.models.peft_adapters import read, save_peft_adapter

VOCAB = 131
SIZES = AdapterSizes(num_places=2, max_rank=40)
KINDS: dict[int, dict[str, Any]] = {
    1: {"r": 8, "lora_alpha": 2, "target_modules": "all-linear", "rank_pattern": {"q_proj": 1, "v_proj": 33}},
    2: {"r": 5, "lora_alpha": 2, "target_modules": ["embed_tokens", "lm_head"], "rank_pattern": {"lm_head": 20}},
    3: {
        "r": 2,
        "lora_alpha": 1,
        "target_modules": ["o_proj"],
        "trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [4, 90, 130]},
    },
}
"""By adapter index."""
PROMPTS = {0: list(range(3, 25)), 1: [7] * 9, 2: [7, 3, 130, 4, 5], 3: [9, 8, 7, 3], 4: [30, 20, 10]}
"""By slot."""
ADAPTERS = {0: 1, 1: 2, 2: 1, 3: 0, 4: 3}
"""By slot; 0: none."""
SOME_LOGPROBS = SequenceSampling(num_logprobs=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("llama"), "llama", vocab_size=VOCAB, num_hidden_layers=1, head_dim=64
    )


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Path]:
    return save_adapters(folder, tmp_path_factory.mktemp("adapters"))


def save_adapters(base: Path, folder: Path) -> Mapping[int, Path]:
    folders = {index: folder / str(index) for index in KINDS}
    for index, path in folders.items():
        save_peft_adapter(base, path, seed=index, **KINDS[index])
    return folders


class Run:
    """Sequences that begin, run and end on a model with adapters; the largest logprobs of each slot."""

    def __init__(self, model: Model, adapters: Mapping[int, Path], **options: Any) -> None:
        self.loader = None
        if model.loaded.adapters is not None:
            self.loader = ModelAdapterLoader(model.loaded.adapters, 3, base_table=model.loaded.base_table)
            for index, path in adapters.items():
                self.loader.load(index, str(index), str(path))
        self.stepper = Stepper(model, adapters=self.loader, **options)
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[np.ndarray]] = {}
        """By slot, of each step: the largest, and their tokens."""

    def begin(self, slot: int, adapter: int | None = None, **fields: Any) -> Any:
        index = ADAPTERS[slot] if adapter is None else adapter
        self.tokens[slot], self.logprobs[slot] = [], []
        sampling = fields.pop("sampling", SOME_LOGPROBS)
        fields |= {"sampling": sampling, "state_pages": self.stepper.state(slot)}
        return sequence(slot, PROMPTS[slot], self.stepper.blocks(slot), adapter_index=index, **fields)

    def step(self, **fields: Any) -> StepResult:
        result = self.stepper.step(**fields)
        counts = result.num_tokens if len(result.num_tokens) else np.ones(len(result.slots), np.int64)
        for slot, token in zip(np.repeat(result.slots, counts).tolist(), result.token_ids.tolist(), strict=True):
            self.tokens[slot].append(token)
        for slot, each in result.logprobs.items():
            self.logprobs[slot].append(np.concatenate((each.top_logprobs, np.array(each.top_token_ids, np.float64))))
        return result


def mixed(run: Run) -> None:
    """Two adapters and none in chunks and decodes; then a third in the place of one that no slot has any more."""
    run.step(admitted=(run.begin(0), run.begin(3)), scheduled=scheduled((0, 16, False), (3, 4, True)))
    run.step(admitted=(run.begin(1), run.begin(2)), scheduled=scheduled((0, 6, True), (1, 9, True), (2, 5, True)))
    run.step(decode_ready=True)
    run.step(decode_ready=True, held_slots=ints(0, 1, 2))
    resumed = {"resumed_slots": ints(0, 2), "decode_ready": True}
    run.step(released_slots=ints(1), admitted=(run.begin(4),), scheduled=scheduled((4, 3, True)), **resumed)
    run.step(decode_ready=True)


def brief(run: Run, adapters: Mapping[int, int]) -> None:
    """Prompts of slots with these adapters, and a decode."""
    admitted = tuple(run.begin(slot, index) for slot, index in adapters.items())
    run.step(admitted=admitted, scheduled=scheduled(*((slot, len(PROMPTS[slot]), True) for slot in adapters)))
    run.step(decode_ready=True)


def on_gpu(folder: Path, sizes: AdapterSizes | None = SIZES, **options: Any) -> Model:
    return Model(folder, sizes, device="cuda", **options)


def test_logprobs_are_those_of_the_cpu(folder: Path, adapters: Mapping[int, Path]) -> None:
    check_logprobs(folder, adapters)


@pytest.mark.slow
def test_scaled_embeddings_tied_tables_and_padded_heads(tmp_path: Path) -> None:
    shape = {"vocab_size": VOCAB, "num_hidden_layers": 2, "head_dim": 48}
    base = make_checkpoint(tmp_path / "model", "gemma2", **shape)
    check_logprobs(base, save_adapters(base, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("family", short_and_long(["granite_h", "kimi_linear", "lfm2", "qwen3_next_delta"], ["lfm2"]))
def test_linears_of_recurrences(tmp_path: Path, family: str) -> None:
    base, modules = make_checkpoint(tmp_path / "model", family), OF_RECURRENT[family]
    configs = {1: {"r": 5}, 2: {"r": 9, "layers_to_transform": [0]}, 3: {"r": 2, "layers_to_transform": [1]}}
    folders = {index: tmp_path / str(index) for index in configs}
    for index, config in configs.items():
        save_peft_adapter(base, folders[index], seed=index, lora_alpha=2, target_modules=list(modules), **config)
    check_logprobs(base, folders)


def check_logprobs(folder: Path, adapters: Mapping[int, Path]) -> None:
    expected = Run(Model(folder, SIZES), adapters)
    mixed(expected)
    assert {slot: len(tokens) for slot, tokens in expected.tokens.items()} == {0: 4, 1: 2, 2: 4, 3: 5, 4: 2}
    found = Run(on_gpu(folder), adapters)
    mixed(found)
    assert found.tokens == expected.tokens
    for slot, rows in expected.logprobs.items():
        assert np.abs(np.array(found.logprobs[slot]) - np.array(rows)).max() < 1e-4


@pytest.mark.usefixtures("ordered_products")
def test_a_request_has_the_bits_that_it_has_beside_others(folder: Path, adapters: Mapping[int, Path]) -> None:
    """With other adapters in the other rows, or none, in another place and of another largest rank.

    Linears of the base are of PyTorch: they give a row the same bits in steps with as many rows.
    """
    first = Run(on_gpu(folder), adapters)
    brief(first, ADAPTERS | {4: 0})
    other = on_gpu(folder, AdapterSizes(3, 64))
    for slot, beside in ((1, {0: 3, 2: 3, 3: 1}), (2, {0: 2, 1: 3, 3: 1})):
        again = Run(other, adapters)
        brief(again, {each: beside.get(each, 0) for each in PROMPTS} | {slot: ADAPTERS[slot]})
        assert again.tokens[slot] == first.tokens[slot]
        assert np.array_equal(np.array(again.logprobs[slot]), np.array(first.logprobs[slot]))
        assert not np.array_equal(np.array(again.logprobs[0]), np.array(first.logprobs[0]))


def test_steps_without_adapters_are_those_of_a_model_without(
    folder: Path, adapters: Mapping[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same launches and bits, once slots with adapters have left, too."""
    launches: list[str] = []
    run = InterpretedFunction.run

    def noted(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        launches.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    none = dict.fromkeys((0, 3), 0)
    with_places = Run(on_gpu(folder), adapters)
    brief(with_places, {0: 1, 1: 2})
    with_places.step(released_slots=ints(0, 1))
    monkeypatch.setattr(InterpretedFunction, "run", noted)
    brief(with_places, none)
    in_use, launches[:] = list(launches), []
    plain = Run(on_gpu(folder, None), {})
    launches.clear()
    brief(plain, none)
    assert in_use == launches
    assert with_places.tokens[0] == plain.tokens[0]
    assert np.array_equal(np.array(with_places.logprobs[0]), np.array(plain.logprobs[0]))


def test_an_unloaded_adapter_gives_its_place_to_another(folder: Path, adapters: Mapping[int, Path]) -> None:
    run = Run(on_gpu(folder, AdapterSizes(1, 40)), adapters)
    assert run.loader is not None
    found: dict[int, np.ndarray] = {}
    for index in (1, 2, 3, 1):
        brief(run, {0: index})
        rows = np.array(run.logprobs[0])
        assert np.array_equal(found.setdefault(index, rows), rows)
        run.step(released_slots=ints(0))
    assert len({tuple(rows.ravel().tolist()) for rows in found.values()}) == 3
    run.loader.unload(2)
    run.loader.unload(1)
    run.loader.load(4, "another", str(adapters[2]))
    brief(run, {0: 4})
    assert np.array_equal(np.array(run.logprobs[0]), found[2])
    assert run.stepper.executor.adapters is run.loader


def test_drafts_are_checked_with_their_slots_adapter(folder: Path, adapters: Mapping[int, Path]) -> None:
    """Launch by launch: with graphs in `test_steps_with_adapters_have_graphs_of_their_own`."""
    model, limits = on_gpu(folder, enforce_eager=True), {"max_drafts": 3, "max_num_seqs": 16, "num_slots": 8}
    plain, drafted = Run(model, adapters, **limits), Run(model, adapters, drafts=NgramSource, **limits)
    for run, max_drafts in ((plain, 0), (drafted, 3)):
        prompts = tuple(run.begin(slot, sampling=SequenceSampling(), max_drafts=3) for slot in (1, 2, 3))
        run.step(admitted=prompts, scheduled=scheduled(*((each.slot, len(each.token_ids), True) for each in prompts)))
        for _ in range(4):
            run.step(decode_ready=True, max_drafts=max_drafts)
    for slot, tokens in plain.tokens.items():
        assert drafted.tokens[slot][: len(tokens)] == tokens
    assert sum(map(len, drafted.tokens.values())) > sum(map(len, plain.tokens.values()))


def test_steps_with_adapters_have_graphs_of_their_own(
    folder: Path, adapters: Mapping[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[tuple[StepSizes, bool]] = []

    def noting(kind: Any) -> Any:
        class Noting(kind):
            def __init__(self, sizes: Any, step: Any, **options: Any) -> None:
                super().__init__(sizes, step, **options)
                self.adapted = step.args[0]

            def replay(self, sizes: StepSizes) -> None:
                if isinstance(self.adapted, bool):  # else these are rounds of choices
                    replayed.append((sizes, self.adapted))
                super().replay(sizes)

        return Noting

    for name in ("DirectReplayer", "CudaGraphs"):
        monkeypatch.setattr(gpu_runner, name, noting(getattr(gpu_runner, name)))
    run = Run(on_gpu(folder), adapters, drafts=NgramSource, max_drafts=1)
    brief(run, {0: 1, 3: 0, 4: 0})
    assert replayed == [(StepSizes(32, 8, 0, 0), True), (StepSizes.decode(4), True)]
    run.step(held_slots=ints(0), decode_ready=True)
    assert replayed.pop() == (StepSizes.decode(2), False)
    drafting = run.begin(1, sampling=SequenceSampling(), max_drafts=1)
    run.step(released_slots=ints(0, 3, 4), admitted=(drafting,), scheduled=scheduled((1, 9, True)))
    run.step(decode_ready=True, max_drafts=1)
    assert replayed.pop() == (StepSizes.decode(1, 1), True)
    drafted = list(run.tokens[1])
    run.step(released_slots=ints(1))
    brief(run, {1: 2})
    assert run.tokens[1] == drafted[:2]


def test_a_gpu_has_places_if_it_is_told(folder: Path) -> None:
    options = {"model": str(folder), "device": "cuda"}
    device = make_device(ExecutorConfig(**options))
    assert adapter_sizes(ExecutorConfig(**options), device) is None
    assert adapter_sizes(ExecutorConfig(**options, max_loras=2), device) == AdapterSizes(2, 64)
    for fields in ({}, {"max_loras": 2}):
        executor, _ = build_model(ExecutorConfig(**options, num_gpu_blocks=8, enforce_eager=True, **fields))
        assert (executor.adapters is None) == (not executor.limits.max_loras) == (not fields)
    with pytest.raises(StartError, match="--max-loras 257: at most 256 are possible on a GPU"):
        on_gpu(folder, AdapterSizes(257, 1))


def test_memory_of_an_adapter(folder: Path, adapters: Mapping[int, Path], tmp_path: Path) -> None:
    """Packed it takes its own numbers and some padding, at most those of its largest rank; a larger rank is refused."""
    model = on_gpu(folder).loaded.adapters
    assert model is not None
    save_peft_adapter(folder, tmp_path, r=16, target_modules="all-linear")
    full = read(folder, tmp_path)
    assert full.num_bytes <= model.pack(full).num_bytes < model.bytes_of_rank(16)
    save_peft_adapter(folder, tmp_path / "everywhere", r=16, target_modules=r".*(proj|embed_tokens|lm_head)")
    assert model.pack(read(folder, tmp_path / "everywhere")).num_bytes == model.bytes_of_rank(16)
    save_peft_adapter(folder, tmp_path / "some", r=3, target_modules=["v_proj", "down_proj"])
    some = read(folder, tmp_path / "some")
    assert some.num_bytes <= model.pack(some).num_bytes <= model.bytes_of_rank(3)
    run = Run(on_gpu(folder, AdapterSizes(1, 8)), {})
    assert run.loader is not None
    with pytest.raises(AdapterRefused, match="a rank of 16: at most 8"):
        run.loader.load(1, "one", str(tmp_path))
