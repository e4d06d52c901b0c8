"""A start as on a GPU: the largest steps, graphs captured at once, a step of each kind; then nothing is new."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from cadenza_common.plan.plan import StateSaves
from cadenza_common.plan.result import StepResult, StepStatus
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.config import ExecutorConfig
from executor_svc.gpu import runner as gpu_runner
from executor_svc.gpu.graphs import DirectReplayer
from executor_svc.gpu.kernels.compile.registry import entries
from executor_svc.gpu.kernels.lora import lora, shrink, tables
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.gpu.step import GpuStepExecutor
from executor_svc.gpu.warm_up import run_steps
from executor_svc.models.adapters.places import AdapterSizes
from executor_svc.plan.description import limits_of
from executor_svc.startup.executors import run_trial
from executor_svc.startup.grammars import Grammars
from executor_svc.startup.speculation import load_speculative_model, make_draft_source, model_on_gpu
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.repeating import repeat_launches
from tests.helpers.executor.plans import columns, ints, plan, scheduled, sequence
from tests.helpers.marks import short_and_long
from tests.helpers.models.agreeing_heads import make_agreeing
from tests.helpers.models.mtp_heads import make_mimo
from tests.helpers.models.quantized_layouts import LAYOUTS, quantize_checkpoint

# What the cache holds at first is anything, and the interpreter multiplies it by numpy.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")]
BLOCK_SIZE = 8
HOW = "graphs", "eager", "repeats"
Compiled = set[tuple[Any, ...]]
Launches = set[tuple[Any, ...]]


class CapturedReplayer(DirectReplayer):
    """Runs each step when it is made, the largest first, as `CudaGraphs` does."""

    def __init__(self, sizes: Sequence[StepSizes], step: Any) -> None:
        super().__init__(sizes, step)
        for each in sorted(sizes, key=lambda size: size.num_tokens, reverse=True):
            step(each)


def specialized(kernel: InterpretedFunction, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton would compile the kernel for: constants, types, what it knows of numbers and addresses."""
    known: list[Any] = [kernel.fn.__module__, kernel.fn.__name__]
    loose = kernel.kwargs["do_not_specialize"] or ()
    unaligned = (*loose, *(kernel.kwargs["do_not_specialize_on_alignment"] or ()))
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            known.append((name, value.dtype, name not in unaligned and value.data_ptr() % 16 == 0))
        elif kernel.fn.__annotations__.get(name) in ("tl.constexpr", tl.constexpr) or name not in kernel.arg_names:
            known.append((name, str(value)))
        elif isinstance(value, int) and name not in loose:
            known.append((name, value == 1, value % 16 == 0, value >= 2**31))
    return tuple(known)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Kernels and the options of their launches, None for those that are left to Triton."""
    found: Launches = set()
    run = InterpretedFunction.run

    def noted(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        found.add((self, *(kwargs.get(name) for name in ("num_warps", "num_stages", "enable_fp_fusion"))))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    return found


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """What has been compiled so far; under the interpreter, what a GPU's compiler would have compiled."""
    found: Compiled = set()
    # What earlier tests of this process have compiled is compiled again: from Triton's cache on disk.
    for entry in entries().values():
        if isinstance(entry.variant.kernel, JITFunction):
            entry.variant.kernel.device_caches.clear()
    run, compile_ = InterpretedFunction.run, JITFunction._do_compile

    def noted(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        found.add(specialized(self, dict(zip(self.arg_names, args, strict=False)) | kwargs))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    def recorded(self: Any, key: Any, *args: Any) -> Any:
        found.add((self.fn.__qualname__, key))
        return compile_(self, key, *args)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    monkeypatch.setattr(JITFunction, "_do_compile", recorded)
    return found


def started(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    adapters: AdapterSizes | None = None,
    grammars: Grammars | None = None,
    **options: Any,
) -> GpuStepExecutor:
    """What `model_build` makes on a GPU; adapters: with places, and nothing that loads some."""
    sizes = {
        "block_size": BLOCK_SIZE, "max_num_seqs": 2, "max_num_batched_tokens": 40, "max_model_len": 64,
        "num_gpu_blocks": 16,
    }  # fmt: skip
    model = Model(folder, adapters, device="cuda", **sizes | options)
    config = ExecutorConfig(**model.options)
    draft = load_speculative_model(config, model.device, model.loaded)
    run_trial(model.loaded, model.device, config, draft)
    monkeypatch.setattr(gpu_runner, "DirectReplayer", CapturedReplayer)
    pools = model.device.new_kv_cache(model.loaded.geometry, config, 0, None if draft is None else draft.layers)
    limits = limits_of(config, model.loaded.geometry, pools)
    limits = limits if grammars is None else grammars.within(limits)
    drafts = make_draft_source(config, limits, draft, model.device, pools, None)
    executor = GpuStepExecutor(
        model.loaded, model.device, pools, limits, enforce_eager=config.enforce_eager, drafts=drafts,
        draft_model=model_on_gpu(draft, model.device),
        grammars=None if grammars is None else grammars.of_slots(limits, "cuda"),
    )  # fmt: skip
    run_steps(executor)
    return executor


def run(executor: GpuStepExecutor, steps: Sequence[dict[str, Any]]) -> list[StepResult]:
    results = [executor.launch(plan(step_id=step_id, **fields), 0).result() for step_id, fields in enumerate(steps, 1)]
    assert all(result.status == StepStatus.OK for result in results)
    return results


@pytest.mark.parametrize(
    ("speculative", "how"),
    short_and_long(
        [(speculative, how) for speculative in ("off", "ngram", "draft", "mtp", "eagle3") for how in HOW],
        [("draft", "graphs"), ("mtp", "eager"), ("off", "repeats")],
    ),
)
def test_no_step_waits_for_a_compiler(
    how: str, speculative: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Compiled
) -> None:
    options: dict[str, Any] = {"enforce_eager": how == "eager", "max_num_batched_tokens": 24}
    if how == "repeats":
        repeat_launches(monkeypatch)
    num_drafts = 0 if speculative == "off" else 2
    if num_drafts:
        options |= {"speculative": speculative, "num_speculative_tokens": num_drafts, "max_num_seqs": 6}
    if speculative == "mtp":
        folder = make_mimo(tmp_path, num_hidden_layers=1)
    elif speculative == "eagle3":
        folder, head = make_agreeing(tmp_path)
        options["speculative_model"] = str(head)
    else:
        folder = make_checkpoint(tmp_path, "llama", vocab_size=131, num_hidden_layers=1, head_dim=64)
    if speculative == "draft":
        options["speculative_model"] = str(folder)
    executor = started(folder, monkeypatch, **options)
    known = set(compiled)
    drawn = SequenceSampling(temperature=0.9, top_p=0.8, frequency_penalty=0.5, num_logprobs=2, num_prompt_logprobs=0)
    first = sequence(0, list(range(30)), [3, 1, 9, 4], sampling=drawn, max_drafts=num_drafts)
    edited = SequenceSampling(min_tokens=3, stop_token_ids=ints(4))
    second = sequence(2, [7], [5, 6], sampling=edited, max_drafts=num_drafts)
    run(
        executor,
        [
            {"admitted": (first,), "scheduled": scheduled((0, 21, False))},
            {"admitted": (second,), "scheduled": scheduled((0, 9, True), (2, 1, True))},
            {"decode_ready": True, "appends": columns((0, 11)), "max_drafts": num_drafts},
            {"decode_ready": True, "held_slots": ints(0), "max_drafts": num_drafts},
            {"released_slots": ints(2), "resumed_slots": ints(0), "decode_ready": True, "max_drafts": num_drafts},
        ],
    )
    assert executor.slots.num_tokens[0] >= 33
    assert compiled == known


def test_no_step_of_a_mixture_waits_for_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Compiled
) -> None:
    """Blocks of each number of rows, between those of the start, and rows in one chunk and in several."""
    folder = make_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=1, head_dim=64)
    executor = started(folder, monkeypatch, dtype="bfloat16", enforce_eager=True, max_num_batched_tokens=30)
    assert executor.token_counts == [16, 21, 42, 85, 170]
    known = set(compiled)
    for length in (3, 18, 25):
        prompt = sequence(0, list(range(2, 2 + length)), list(range(4)))
        run(executor, [{"admitted": (prompt,), "scheduled": scheduled((0, length, True))}, {"released_slots": ints(0)}])
    assert compiled == known


@pytest.mark.parametrize("quantization", short_and_long(["none", "int8"], ["none"]))
def test_no_step_in_exact_mode_waits_for_a_compiler(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Compiled
) -> None:
    """Parts of columns by programs of their own and by one; segments of one program and shared, of drafts too."""
    sizes = {"hidden_size": 1024, "intermediate_size": 32, "head_dim": 64, "num_hidden_layers": 1}
    folder = make_checkpoint(tmp_path, "llama", vocab_size=131, num_attention_heads=2, num_key_value_heads=1, **sizes)
    options: dict[str, Any] = {
        "dtype": "bfloat16", "numerics": "exact", "quantization": quantization, "max_model_len": 300, "max_num_seqs": 3,
        "num_gpu_blocks": 60, "max_num_batched_tokens": 70, "speculative": "ngram",
    }  # fmt: skip
    executor = started(folder, monkeypatch, enforce_eager=True, **options)
    names = {str(name).rpartition(".")[2] for known in compiled for name in known[:2]}
    assert {"exact_attention_kernel", "exact_product_kernel", "_sum_splits"} <= names
    assert not {"attention_kernel", "split_kernel", "_linear_w8"} & names
    known = set(compiled)
    long = sequence(0, [5] * 290, list(range(38)), computed=280, max_drafts=3)
    steps: list[dict[str, Any]] = [{"admitted": (long,), "scheduled": scheduled((0, 9, False))}]
    steps += [{"scheduled": scheduled((0, 1, True)), "max_drafts": 3}, {"decode_ready": True, "max_drafts": 3}]
    steps.append({"admitted": (sequence(1, [7] * 65, list(range(40, 50))),), "scheduled": scheduled((1, 65, True))})
    run(executor, steps)
    assert compiled == known


@pytest.mark.parametrize("family", short_and_long(["lfm2", "granite_h", "qwen3_5_delta"], ["qwen3_5_delta"]))
def test_no_step_with_recurrent_states_waits_for_a_compiler(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Compiled
) -> None:
    """Chunks, decodes by a graph, drafts, and saves, which no step of the start has."""
    folder = make_checkpoint(tmp_path, family)
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "speculative": "ngram", "num_speculative_tokens": 2}
    executor = started(folder, monkeypatch, dtype="bfloat16", **options)
    known = set(compiled)
    assert "_write_rings" in {str(name).rpartition(".")[2] for found in compiled for name in found[:2]}
    size, strips = executor.limits.pages_per_state, executor.limits.num_tables
    states = [list(range(start, start + size)) for start in range(4 * strips, 4 * strips + 3 * size, size)]
    blocks = list(range(4 * strips))
    first = sequence(0, list(range(30)), blocks, max_drafts=2, max_len=60, state_pages=states[0])
    saves = StateSaves([0, 0], [8, 29], states[1] + states[2])
    results = run(
        executor,
        [
            {"admitted": (first,), "state_saves": saves, "scheduled": scheduled((0, 21, False))},
            {"scheduled": scheduled((0, 9, True)), "max_drafts": 2},
            {"decode_ready": True, "max_drafts": 2},
        ],
    )
    named = [each for result in results for each in zip(result.saved_slots, result.saved_positions, strict=True)]
    assert named == [(0, 8), (0, 29)]
    assert compiled == known


@pytest.mark.long
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_no_step_with_adapters_waits_for_a_compiler(
    enforce_eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Compiled
) -> None:
    """Few rows and many, prompts with logprobs, decodes with graphs and with drafts, beside steps without adapters."""
    for module in (tables, lora, shrink):
        monkeypatch.setattr(module, "FEW_ROWS", 8)
    folder = make_checkpoint(tmp_path, "gemma2", vocab_size=131, num_hidden_layers=1, head_dim=64)
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "speculative": "ngram", "num_speculative_tokens": 1}
    executor = started(folder, monkeypatch, AdapterSizes(2, 20), enforce_eager=enforce_eager, **options)
    known = set(compiled)
    names = {str(name).rpartition(".")[2] for found in compiled for name in found[:2]}
    kernels = {"_sort_rows", "_shrink", "_expand", "_take_ranks", "_replace_embeddings", "_replace_logits"}
    assert {*kernels, "_scale_rows"} <= names
    logprobs = SequenceSampling(num_logprobs=2, num_prompt_logprobs=1)
    first = sequence(0, list(range(30)), [3, 1, 9, 4], max_drafts=1)
    second = sequence(2, [7], [5, 6], sampling=logprobs, max_drafts=1)
    begins = [
        {"admitted": (first,), "scheduled": scheduled((0, 21, False))},
        {"admitted": (second,), "scheduled": scheduled((0, 9, True), (2, 1, True))},
    ]
    decodes: list[dict[str, Any]] = [{"decode_ready": True, "appends": columns((0, 11)), "max_drafts": 1}]
    decodes += [{"decode_ready": True, "held_slots": ints(0)}, {"released_slots": ints(0, 2)}]
    adapted = executor.adapted()
    assert adapted is not None
    with adapted:
        run(executor, [*begins, *decodes])
    run(executor, begins)
    assert compiled == known


@pytest.mark.long
def test_kernels_of_long_decodes_are_compiled_without_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Compiled
) -> None:
    folder = make_checkpoint(tmp_path, "llama", vocab_size=131, num_hidden_layers=1, head_dim=64)
    options = {"dtype": "bfloat16", "max_model_len": 300, "max_num_seqs": 4, "num_gpu_blocks": 40}
    executor = started(folder, monkeypatch, enforce_eager=True, speculative="ngram", **options)
    names = {str(name).rpartition(".")[2] for known in compiled for name in known[:2]}
    assert {"attention_kernel", "split_kernel"} <= names
    known = set(compiled)
    # Of two tokens of a sequence, split too.
    long = sequence(0, [5] * 270, list(range(36)), computed=269, max_drafts=3)
    (result,) = run(executor, [{"admitted": (long,), "decode_ready": True, "max_drafts": 3}])
    assert result.num_drafts.tolist() == [3]
    assert compiled == known


@pytest.mark.long
def test_a_start_leaves_slots_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Compiled) -> None:
    folder = make_checkpoint(tmp_path, "llama", vocab_size=131, num_hidden_layers=1, head_dim=64)
    executor = started(folder, monkeypatch, quantization="int8", dtype="bfloat16")
    known = set(compiled)
    assert not executor.slots.admitted.any()
    # In the very slot that the start has used, with rows between those of two tiles of the linears.
    prompt = list(range(5, 40))
    step = {"admitted": (sequence(0, prompt, [8, 2, 7, 4, 1]),), "scheduled": scheduled((0, len(prompt), True))}
    first, _ = run(executor, [step, {"decode_ready": True}])
    assert first.slots.tolist() == [0]
    assert 0 <= first.token_ids[0] < 131
    assert compiled == known


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are seen under Triton's interpreter")
@pytest.mark.parametrize("quantization", short_and_long(["int8", "fp8_w8a8", "gptq", "none"], ["fp8_w8a8"]))
def test_launches_are_as_kernels_were_compiled_ahead_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: Launches, quantization: str
) -> None:
    """Warps, stages and FP fusion are said each time, and as the kernel's variants say them; those of adapters, too."""
    sizes = {"hidden_size": 1024, "intermediate_size": 32, "head_dim": 64, "num_hidden_layers": 1}
    folder = make_checkpoint(tmp_path, "llama", vocab_size=131, **sizes)
    options: dict[str, Any] = {"dtype": "bfloat16", "num_cpu_blocks": 2, "max_num_batched_tokens": 18}
    if quantization in LAYOUTS:
        quantize_checkpoint(folder, quantization, tmp_path / "few bits", tmp_path / "dense")
        executor = started(tmp_path / "few bits", monkeypatch, **options)
    else:
        places = AdapterSizes(2, 20) if quantization == "none" else None
        executor = started(folder, monkeypatch, places, quantization=quantization, **options)
    drawn = SequenceSampling(temperature=0.9, top_p=0.8, frequency_penalty=0.5, num_logprobs=2)
    run(executor, [{"admitted": (sequence(0, [5, 6], [0], sampling=drawn),), "scheduled": scheduled((0, 2, True))}])
    # How many warps hangs on sizes too.
    assert {kernel.fn.__name__ for kernel, num_warps, *_ in launched if num_warps is None} == set()
    options = {(kernel, num_stages, fp_fusion) for kernel, _, num_stages, fp_fusion in launched}
    kinds = {type(kernel) for kernel, *_ in launched}  # Gluon's kernels are not interpreted
    variants = [entry.variant for entry in entries().values() if type(entry.variant.kernel) in kinds]
    known = {(each.kernel, each.num_stages, each.fp_fusion) for each in variants}
    assert len(options) > 15
    assert {(kernel.fn.__name__, *others) for kernel, *others in options - known} == set()
