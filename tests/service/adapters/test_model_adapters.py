"""LoRA adapters that peft made, through both services with real models: peft's tokens, while adapters come and go."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cadenza import AsyncClient, RequestOutput, SamplingParams
from cadenza.errors import FailedPreconditionError, InvalidRequestError
from executor_svc.replay import __main__ as executor_replay
from scheduler_svc.replay import __main__ as scheduler_replay
from tests.checkpoints import FAMILIES, make_checkpoint, make_llama
from tests.helpers.marks import short_and_long
from tests.helpers.models.golden import TIE, random_prompts, transformers_greedy
from tests.helpers.models.peft_adapters import save_peft_adapter
from tests.helpers.services import cadenza_services, executor_service, scheduler_service

NEW_TOKENS = 24
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
PROMPTS = random_prompts(131, (1, 17, 40))
KINDS: dict[str, dict[str, Any]] = {
    "one": {"r": 1, "lora_alpha": 2, "target_modules": "all-linear"},
    "wide": {"r": 64, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True},
    "some": {
        "r": 8, "lora_alpha": 3, "target_modules": r".*\.1\..*(o_proj|down_proj)", "rank_pattern": {"o_proj": 3},
        "alpha_pattern": {"down_proj": 5},
    },
    "embedding": {"r": 4, "lora_alpha": 2, "target_modules": ["embed_tokens", "o_proj"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of a Llama by name."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, (name, config) in enumerate(KINDS.items()):
        save_peft_adapter(model, root / name, seed=seed, **config)
    return {name: root / name for name in KINDS}


def lora(folders: dict[str, Path], **more: Any) -> dict[str, Any]:
    return {"lora": [f"{name}={folder}" for name, folder in folders.items()], **more}


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def check_tokens(reference: Any, prompt: list[int], found: list[int]) -> None:
    """Compare with peft's unmerged model, up to a tie."""
    wanted = transformers_greedy(reference, prompt, NEW_TOKENS)
    for ours, theirs, logits in zip(found, wanted.tokens, wanted.logits, strict=True):
        if ours != theirs:
            best = logits.topk(2).values
            assert best[0] - best[1] < TIE * logits.abs().max(), (found, wanted.tokens)
            return


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", short_and_long(FAMILIES, ["gemma3_text", "llama", "phi3"]))
async def test_tokens_are_those_of_peft(family: str, tmp_path: Path) -> None:
    """Adapters of all kinds and none in one batch, more than may run at once."""
    base = make_checkpoint(tmp_path / "model", family)
    references = {
        name: save_peft_adapter(base, tmp_path / name, seed=seed, **config)
        for seed, (name, config) in enumerate(KINDS.items())
    }
    names = [name for name in references for _ in PROMPTS]
    options = {"dtype": "float32", "max_loras": 3, "num_gpu_blocks": 200}
    adapters = lora({name: tmp_path / name for name in references})
    async with (
        cadenza_services(base, scheduler=adapters, **options) as running,
        AsyncClient(running.target) as client,
    ):
        without = await client.generate(PROMPTS, PARAMS)
        found = await client.generate(PROMPTS * len(references) + PROMPTS, PARAMS, adapter=[*names, *[None] * 3])
        await running.wait_until_free()
    for prompt, name, output in zip(PROMPTS * len(references), names, tokens(found), strict=False):
        check_tokens(references[name], prompt, output)
    assert tokens(found)[-3:] == tokens(without)
    assert len({tuple(each) for each in tokens(found)}) > 3 * len(PROMPTS)


@pytest.mark.long
async def test_unloads_and_reloads_under_load_lose_nothing(
    model: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Of 8 contents under 4 names, each request has that of its name when it was sent; and replays give the same."""
    contents = [folders[name] for name in KINDS]
    for seed in range(4):
        save_peft_adapter(model, tmp_path / str(seed), seed=10 + seed, **KINDS["one"])
        contents.append(tmp_path / str(seed))
    options = {"dtype": "float32", "max_loras": 2, "max_cpu_loras": 4, "num_gpu_blocks": 120, "num_cpu_blocks": 40}
    roots = {"lora_root": [str(folders["one"].parent), str(tmp_path)], "record": str(tmp_path / "log")}
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=40, ignore_eos=True, logprobs=1)
    async with (
        cadenza_services(model, scheduler=roots, **options) as running,
        AsyncClient(running.target) as client,
    ):
        held = {f"name {index}": index for index in range(3)}
        for name, index in held.items():
            await client.load_adapter(name, str(contents[index]))
        alone = {index: await client.generate(PROMPTS, params, adapter=f"name {index}") for index in range(3)}
        sent = []
        for turn in range(8):
            for name in held:
                sent.append((held[name], asyncio.create_task(client.generate(PROMPTS, params, adapter=name))))
            await asyncio.sleep(0)
            name, index = f"name {turn % 3}", (turn + 3) % len(contents)
            first = asyncio.create_task(client.generate(PROMPTS, params, adapter=name))
            sent.append((held[name], first))
            await first
            await client.unload_adapter(name)
            await client.load_adapter(name, str(contents[index]))
            held[name] = index
        found = [(index, await task) for index, task in sent]
        for index in range(len(contents)):
            await client.load_adapter("again", str(contents[index]))
            again = await client.generate(PROMPTS, params, adapter="again")
            alone.setdefault(index, again)
            assert bits(again) == bits(alone[index])
            await client.unload_adapter("again")
        for index, outputs in found:
            assert bits(outputs) == bits(alone[index])
        await running.wait_until_free()
    assert len({str(bits(outputs)) for outputs in alone.values()}) == len(contents)
    assert scheduler_replay.main([str(tmp_path / "log")]) == 0
    assert executor_replay.main([str(tmp_path / "log")]) == 0


def bits(outputs: list[RequestOutput]) -> list[tuple[list[int], list[float]]]:
    """Return tokens and their logprobs."""
    found = []
    for output in outputs:
        (sample,) = output.outputs
        assert sample.logprobs is not None
        chosen = zip(sample.token_ids, sample.logprobs, strict=True)
        found.append((sample.token_ids, [row[token].logprob for token, row in chosen]))
    return found


@pytest.mark.long
async def test_a_new_executor_loads_anew_and_no_token_changes(model: Path, folders: dict[str, Path]) -> None:
    names = ["one", "wide", None, "embedding"]
    prompts = [PROMPTS[1]] * len(names)
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=150, ignore_eos=True, logprobs=1)
    options = {"dtype": "float32", "num_gpu_blocks": 100}
    async with executor_service(model, **options) as address:
        scheduler = scheduler_service(address, one_session=False, **lora(folders))
        running = await scheduler.__aenter__()
        client = await AsyncClient(running.target).__aenter__()
        expected = await client.generate(prompts, params, adapter=names)
        generating = asyncio.create_task(client.generate(prompts, params, adapter=names))
        async with asyncio.timeout(10):
            while not (await running.load()).num_running:
                pass
    try:
        async with executor_service(model, listen=address, **options):
            assert bits(await generating) == bits(expected)
    finally:
        await client.__aexit__(None, None, None)
        await scheduler.__aexit__(None, None, None)


def copy_of(folder: Path, target: Path, **config: Any) -> Path:
    """Copy an adapter with changed fields of its configuration."""
    shutil.copytree(folder, target)
    path = target / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return target


async def test_broken_and_foreign_adapters_fail_alone_and_by_name(
    model: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    one = folders["one"]
    shape, lacks, binary = (copy_of(one, tmp_path / name) for name in ("shape", "lacks", "binary"))
    stored = load_file(one / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    save_file({**stored, name: torch.zeros(7, 1)}, shape / "adapter_model.safetensors")
    save_file({key: value for key, value in stored.items() if key != name}, lacks / "adapter_model.safetensors")
    (binary / "adapter_model.safetensors").unlink()
    torch.save(stored, binary / "adapter_model.bin")
    save_peft_adapter(model, tmp_path / "large", r=65, lora_alpha=1, target_modules=["q_proj"])
    other = make_checkpoint(tmp_path / "other model", "qwen2", num_hidden_layers=3)
    save_peft_adapter(other, tmp_path / "foreign", r=2, lora_alpha=1, target_modules="all-linear")
    messages = {
        "shape": r"layers\.1\.mlp\.down_proj\.lora_B",
        "lacks": r"layers\.1\.mlp\.down_proj",
        "binary": r"adapter_model\.bin",
        "large": "65",
        "foreign": r"layers\.2\.",
        "dora": "use_dora",
        "bias": "bias",
    }
    copy_of(one, tmp_path / "dora", use_dora=True)
    copy_of(one, tmp_path / "bias", bias="all")
    given = lora({"one": one, **{each: tmp_path / each for each in messages}}, lora_root=[str(tmp_path)])
    async with (
        cadenza_services(model, scheduler=given, dtype="float32", num_gpu_blocks=100) as running,
        AsyncClient(running.target) as client,
    ):
        good = asyncio.create_task(client.generate(PROMPTS, PARAMS, adapter="one"))
        for each, message in messages.items():
            with pytest.raises(FailedPreconditionError, match=rf"(?s)^adapter: .*{each}.*{message}"):
                await client.generate(PROMPTS[:1], PARAMS, adapter=each)
        with pytest.raises(InvalidRequestError, match=messages["shape"]):
            await client.load_adapter("another", str(shape))
        assert tokens(await good) == tokens(await client.generate(PROMPTS, PARAMS, adapter="one"))


async def test_a_model_through_transformers_has_none(folders: dict[str, Path], tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path, "gptj")
    async with (
        cadenza_services(base, scheduler=lora(folders), num_gpu_blocks=100) as running,
        AsyncClient(running.target) as client,
    ):
        with pytest.raises(FailedPreconditionError, match=r"^adapter: .*no LoRA adapters"):
            await client.generate(PROMPTS[:1], PARAMS, adapter="one")
        assert tokens(await client.generate(PROMPTS[:1], PARAMS))
