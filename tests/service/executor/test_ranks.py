"""A model in two ranks, as real processes: tokens of transformers and of peft, and what is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from cadenza import LLM, SamplingParams
from executor_svc.config import ExecutorConfig
from executor_svc.startup.executors import make_device
from executor_svc.startup.rank_checks import RanksError, check_ranks, threads_of
from tests.checkpoints import make_checkpoint
from tests.helpers.marks import short_and_long
from tests.helpers.models.eagle3_heads import HeadShape, make_head
from tests.helpers.models.golden import random_prompts, transformers_greedy, transformers_model
from tests.helpers.models.mtp_heads import make_mimo
from tests.helpers.models.peft_adapters import save_peft_adapter
from tests.helpers.models.qwen_mtp import make_qwen_mtp
from tests.helpers.service_process import service_process

NEW_TOKENS = 16


def test_tokens_of_every_request_with_adapters_and_drafts(tmp_path: Path) -> None:
    """A tied model; adapters on all linears, on the table and on the head; drafts from the text itself."""
    base = make_checkpoint(tmp_path / "model", "qwen3")
    kinds = {
        "linears": {"r": 8, "target_modules": "all-linear"},
        "table": {"r": 3, "target_modules": ["embed_tokens", "o_proj"]},
        "tokens": {"r": 2, "target_modules": ["down_proj"], "trainable_token_indices": [5, 7, 90, 130]},
    }
    references = {
        name: save_peft_adapter(base, tmp_path / name, seed=seed, lora_alpha=2, **config)
        for seed, (name, config) in enumerate(kinds.items())
    }
    prompts = random_prompts(131, (1, 40))
    prompts.append([9, 8, 7, 6] * 8)
    sizes = {"num_gpu_blocks": 100, "max_num_seqs": 16, "max_num_batched_tokens": 64, "max_loras": 2}
    lora = [f"{name}={tmp_path / name}" for name in kinds]
    names = [*kinds, None]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(str(base), dtype="float32", tensor_parallel_size=2, lora=lora, speculative="ngram", **sizes) as llm:
        found = llm.generate(
            prompts * len(names), params, adapter=[name for name in names for _ in prompts], use_tqdm=False
        )
    models = [*references.values(), transformers_model(base)]
    expected = [transformers_greedy(model, prompt, NEW_TOKENS).tokens for model in models for prompt in prompts]
    assert [output.outputs[0].token_ids for output in found] == expected


@pytest.mark.slow
def test_tokens_of_a_mixture_with_an_adapter_and_drafts(tmp_path: Path) -> None:
    """Experts on one rank or the other, what all tokens share on both; the adapter changes attention."""
    base = make_checkpoint(tmp_path / "model", "qwen2_moe")
    adapter = {"r": 4, "target_modules": ["q_proj", "v_proj", "o_proj"], "lora_alpha": 2}
    models = [save_peft_adapter(base, tmp_path / "attention", **adapter), transformers_model(base)]
    models[0].config._experts_implementation = "eager"  # the other one has no products of float64
    prompts = [*random_prompts(131, (1, 40)), [9, 8, 7, 6] * 8]
    sizes = {"num_gpu_blocks": 100, "max_num_seqs": 16, "max_num_batched_tokens": 64, "max_loras": 1}
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    lora, names = [f"attention={tmp_path / 'attention'}"], ["attention", None]
    with LLM(str(base), dtype="float32", tensor_parallel_size=2, lora=lora, speculative="ngram", **sizes) as llm:
        found = llm.generate(prompts * 2, params, adapter=[name for name in names for _ in prompts], use_tqdm=False)
    expected = [transformers_greedy(model, prompt, NEW_TOKENS).tokens for model in models for prompt in prompts]
    assert [output.outputs[0].token_ids for output in found] == expected


@pytest.mark.long
@pytest.mark.parametrize("kind", short_and_long(["mtp", "mtp of a hybrid", "eagle3"], ["mtp of a hybrid"]))
def test_tokens_with_drafts_of_a_head(tmp_path: Path, kind: str) -> None:
    """Rank 0 runs the head, with the whole table and linear to logits of a model that is divided."""
    prompts = [*random_prompts(131, (1, 40)), [9, 8, 7, 6] * 8]
    base = make_checkpoint(tmp_path / "qwen2", "qwen2", use_sliding_window=False)
    expected = [transformers_greedy(transformers_model(base), prompt, NEW_TOKENS).tokens for prompt in prompts]
    options: dict[str, Any] = {"speculative": kind.split()[0]}
    if kind == "mtp of a hybrid":
        base = make_qwen_mtp(tmp_path / "qwen3_5", "qwen3_5_delta")
        expected = [transformers_greedy(transformers_model(base), prompt, NEW_TOKENS).tokens for prompt in prompts]
    elif kind == "mtp":
        base = make_mimo(tmp_path / "mimo")
    else:
        shape = HeadShape(draft_vocab_size=131, own_embedding=False, own_head=False)
        options["speculative_model"] = str(make_head(tmp_path / "head", shape))
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    sizes = {"num_gpu_blocks": 100, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    with LLM(str(base), dtype="float32", tensor_parallel_size=2, **options, **sizes) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in found] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inject": "error=5"}, "--inject"),
        ({"quantization": "int8", "save_quantized": "folder"}, "--save-quantized"),
        ({"simulate": "name=any"}, "--simulate"),
    ],
)
def test_options_that_are_not_possible_with_ranks(options: dict[str, str], message: str) -> None:
    config = ExecutorConfig(model="any", device="cpu", tensor_parallel_size=2, **options)
    with pytest.raises(RanksError, match=f"--tensor-parallel-size 2 is not possible with {re.escape(message)}"):
        check_ranks(config, make_device(config))


@pytest.mark.long
@pytest.mark.parametrize("to", short_and_long(["the executor", "every process"], ["every process"]))
async def test_a_stop_in_order_is_no_end_of_a_rank(tmp_path: Path, to: str) -> None:
    """As by a user, or by a service manager that signals all processes of a service."""
    model = make_checkpoint(tmp_path, "llama")
    sizes = "--num-gpu-blocks", "64", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"
    options = "--model", str(model), "--device", "cpu", "--tensor-parallel-size", "2", *sizes
    async with service_process("executor_svc", *options) as executor:
        children = psutil.Process(executor.process.pid).children()
        ranks = [each for each in children if "-m" in each.cmdline()]  # beside the server of forks
        assert len(ranks) == 1
        if to == "every process":
            for rank in ranks:
                rank.terminate()
        executor.process.terminate()
        assert await executor.process.wait() == 0
        _, alive = psutil.wait_procs(ranks, timeout=20)
        assert not alive
        await executor.end()
    assert not [line for line in executor.lines if "ended" in line]


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_svc.startup.rank_checks.cores", lambda: 7)
    config = ExecutorConfig(model="any", device="cpu", tensor_parallel_size=3)
    assert threads_of(config).num_threads == 2
    assert threads_of(config.model_copy(update={"num_threads": 5})).num_threads == 5


def test_a_model_that_cannot_be_divided_is_refused_by_its_field(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path, "llama")
    before = torch.get_num_threads()
    with pytest.raises(Exception, match="num_attention_heads 4 cannot be divided among 3 ranks"):
        LLM(str(base), tensor_parallel_size=3)
    assert torch.get_num_threads() == before
