"""Models that run through transformers' code with our attention: its greedy tokens, and clear errors for the others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from cadenza import AsyncClient, SamplingParams
from cadenza_common.plan.result import StepResult, StepStatus
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.config import ExecutorConfig
from executor_svc.models.loading import LoadedModel, LoaderError, load_model, load_through_transformers
from executor_svc.models.through_transformers import probe
from executor_svc.models.through_transformers.hosted import HostedModel
from executor_svc.models.through_transformers.self_check import paged_logits
from executor_svc.plan.description import limits_of
from executor_svc.startup.build import build_model
from executor_svc.startup.executors import make_device, make_executor
from executor_svc.worker.eager_runner import EagerRunner
from executor_svc.worker.step import StepExecutor
from tests.checkpoints import HOSTED, edit_config, make_checkpoint
from tests.helpers.executor.plans import ints, plan, scheduled, sequence
from tests.helpers.models.golden import random_prompts, teacher_forced, transformers_greedy, transformers_model
from tests.helpers.paths import ROOT
from tests.helpers.services import cadenza_services

BLOCK_SIZE = 8
NEW_TOKENS = 12
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in HOSTED},
    "falcon": ("falcon", {"bias": False}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {"word_embed_proj_dim": 24}),
    "phi": ("phi", {"qk_layernorm": True}),
    "gemma2": ("gemma2", {"num_hidden_layers": 2}),
    "falcon, grouped heads": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "initializer_range": 0.3},
    ),
    "opt, norms after": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 40}),
}
"""A family and what its shape has beside the usual."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by the name of their shape, made when first needed."""
    root = tmp_path_factory.mktemp("hosted")

    class Folders(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            family, shape = SHAPES[name]
            self[name] = make_checkpoint(root / name, family, **shape)
            return self[name]

    return Folders()


def options(folder: Path, **given: Any) -> ExecutorConfig:
    usual = {"numerics": "fast", "num_threads": 1, "block_size": BLOCK_SIZE, "num_gpu_blocks": 40, "max_num_seqs": 4}
    usual["disable_hybrid_kv_cache_manager"] = True  # plans here have one block table
    return ExecutorConfig(**{"model": str(folder), "max_num_batched_tokens": 64, **usual, **given})


class Served:
    """A model loaded through transformers, even one that we have code for, and its executor over a cache of NaN."""

    def __init__(self, folder: Path, **given: Any) -> None:
        self.config = options(folder, **given)
        self.device = make_device(self.config)
        content = json.loads((folder / "config.json").read_text())
        self.loaded: LoadedModel = load_through_transformers(
            self.config, self.device, folder, content, content["architectures"]
        )
        pools = self.device.new_kv_cache(self.loaded.geometry, self.config)
        for layer in pools.layers:
            layer.fill_(float("nan"))
        limits = limits_of(self.config, self.loaded.geometry, pools)
        self.executor = make_executor(self.loaded, self.device, pools, limits)
        assert isinstance(self.executor, StepExecutor)
        assert isinstance(self.executor._runner, EagerRunner)
        self.outputs: dict[int, list[int]] = defaultdict(list)
        """By slot."""
        self._step_id = 0

    @property
    def model(self) -> Any:
        """The model of transformers."""
        assert isinstance(self.loaded.model, HostedModel)
        return self.loaded.model._model

    def step(self, **fields: Any) -> StepResult:
        self._step_id += 1
        result = self.executor.execute(plan(step_id=self._step_id, **fields), 0)
        assert result.status == StepStatus.OK, result.error_message
        assert not result.errors
        for slot, token in zip(result.slots.tolist(), result.token_ids.tolist(), strict=True):
            self.outputs[slot].append(token)
        return result


def test_a_stored_head_is_used_whatever_config_says(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gpt2", tie_word_embeddings=False)
    edit_config(folder, tie_word_embeddings=True)
    served, (prompt,) = Served(folder), random_prompts(131, (20,))
    served.step(admitted=(sequence(0, prompt, [9, 3, 30, 1]),), scheduled=scheduled((0, 20, True)))
    while len(served.outputs[0]) < NEW_TOKENS:
        served.step(decode_ready=True)
    assert served.outputs[0] == transformers_greedy(transformers_model(folder), prompt, NEW_TOKENS).tokens


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gptj")
    path, name = folder / "model.safetensors", "transformer.h.1.mlp.fc_in.weight"
    tensors = load_file(path)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(LoaderError, match=f"^model folder .*: tensor {name} holds NaN or infinite numbers: the checkp"):
        build_model(options(folder))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SHAPES)
def test_greedy_equals_transformers(folders: dict[str, Path], name: str) -> None:
    """Chunks beside decodes, a prefix that another has computed, blocks that are used again."""
    served, reference = Served(folders[name]), transformers_model(folders[name])
    first, short, tail, last = random_prompts(131, (45, 3, 6, 33))
    second = first[:24] + tail
    served.step(
        admitted=(sequence(0, first, [9, 3, 30, 1, 17, 4, 22, 8, 31, 6]), sequence(1, short, [12, 5, 20])),
        scheduled=scheduled((0, 20, False), (1, 3, True)),
    )
    served.step(decode_ready=True, scheduled=scheduled((0, 20, False)))
    served.step(decode_ready=True, scheduled=scheduled((0, 5, True)))
    served.step(
        decode_ready=True,
        admitted=(sequence(2, second, [9, 3, 30, 2, 11, 13, 7, 38], computed=24),),
        scheduled=scheduled((2, 6, True)),
    )
    while len(served.outputs[1]) < NEW_TOKENS:
        served.step(decode_ready=True)
    served.step(
        decode_ready=True,
        released_slots=ints(1),
        admitted=(sequence(3, last, [5, 39, 12, 0, 20, 21]),),
        scheduled=scheduled((3, 33, True)),
    )
    while len(served.outputs[3]) < NEW_TOKENS:
        served.step(decode_ready=True)
    for slot, prompt in enumerate((first, short, second, last)):
        wanted = transformers_greedy(reference, prompt, NEW_TOKENS).tokens
        assert served.outputs[slot][:NEW_TOKENS] == wanted, slot
    assert len({token for tokens in served.outputs.values() for token in tokens}) > 10, "continuations do not wander"
    assert not any(isinstance(part, nn.Linear) for part in served.model.modules())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gpt2", "falcon", "gemma2", "gpt_neox"])
def test_bfloat16_is_close(folders: dict[str, Path], name: str) -> None:
    """Our bf16 logits differ from transformers' fp32 ones by no more than its own bf16 logits do, or little more."""
    texts = [torch.tensor(text) for text in random_prompts(131, (37, 21))]
    served = Served(folders[name], dtype="bfloat16")
    ours = torch.cat(paged_logits(served.loaded.model, texts, served.device, 512, BLOCK_SIZE))
    exact, theirs = (
        torch.cat([teacher_forced(transformers_model(folders[name], dtype), text.tolist()) for text in texts])
        for dtype in (torch.float32, torch.bfloat16)
    )
    their_error, our_error = ((found - exact).square().mean().sqrt() for found in (theirs, ours))
    assert our_error <= 1.25 * their_error + 1e-3, (our_error, their_error)
    assert our_error < 0.1 * exact.std()


@pytest.mark.parametrize("name", ["gemma2", "opt"])
def test_prompt_logprobs(folders: dict[str, Path], name: str) -> None:
    """Logits of rows that are not sampled go through the same head, softcap included."""
    (prompt,) = random_prompts(131, (30,))
    served = Served(folders[name])
    asking = sequence(0, prompt, [7, 2, 9, 4], sampling=SequenceSampling(num_prompt_logprobs=0))
    found: list[float] = []
    for chunk in (13, 17):
        admitted = (asking,) if chunk == 13 else ()
        result = served.step(admitted=admitted, scheduled=scheduled((0, chunk, chunk == 17)))
        found += [value for part in result.prompt_logprobs.values() for value in part.logprobs]
    logprobs = teacher_forced(transformers_model(folders[name]), prompt).log_softmax(-1)
    wanted = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), wanted, rtol=0, atol=2e-4)


async def test_through_both_services(folders: dict[str, Path]) -> None:
    """With the default of --numerics, which then is fast."""
    reference, prompts = transformers_model(folders["gptj"]), random_prompts(131, (1, 17, 64))
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    limits: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 8,
        "num_gpu_blocks": 24,
        "num_threads": 1,
    }
    async with (
        cadenza_services(folders["gptj"], **limits) as running,
        AsyncClient(running.target) as client,
    ):
        outputs = await client.generate(prompts, sampling)
        await running.wait_until_free()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == transformers_greedy(reference, prompt, NEW_TOKENS).tokens


def test_description_and_fingerprint(folders: dict[str, Path], tmp_path: Path) -> None:
    _, found = build_model(options(folders["opt"], numerics="auto"))
    geometry = found.loaded.geometry
    assert (geometry.architecture, geometry.model_type) == ("OPTForCausalLM", "opt")
    assert (geometry.vocab_size, geometry.hidden_size) == (131, 24)
    assert (geometry.num_layers, geometry.num_heads, geometry.num_kv_heads, geometry.head_size) == (2, 4, 4, 10)
    assert (geometry.max_model_len, geometry.dtype, found.fingerprint.mode) == (512, "float32", "fast")
    assert geometry.num_parameters == sum(p.numel() for p in transformers_model(folders["opt"]).parameters())
    assert found.loaded.eos_token_ids == (1,)
    (tmp_path / "config.json").write_text((folders["opt"] / "config.json").read_text())
    random_ones = [build_model(options(tmp_path, load_format="dummy", seed=seed))[1].fingerprint for seed in (0, 0, 1)]
    weights = [found.fingerprint.weights_digest, *(print_.weights_digest for print_ in random_ones)]
    assert weights[1] == weights[2]
    assert len(set(weights)) == 3
    edit_config(tmp_path, activation_function="gelu")
    other = build_model(options(tmp_path, load_format="dummy"))[1].fingerprint
    assert other.weights_digest == weights[1]
    assert other.digest != random_ones[0].digest


FRESH = """
import sys
from executor_svc.config import ExecutorConfig
from executor_svc.startup.build import build_model
build_model(ExecutorConfig(model=sys.argv[1], num_gpu_blocks=8, num_threads=1))
print([name for name in sys.modules if name.startswith("transformers")])
"""


def test_own_models_need_no_transformers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FRESH, str(make_checkpoint(tmp_path, "llama", num_hidden_layers=1))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def config_folder(folder: Path, family: str, **fields: Any) -> Path:
    """Write a tiny config.json alone, for --load-format dummy."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    content = AutoConfig.for_model(family).to_dict()
    content |= {"vocab_size": 131, "num_hidden_layers": 2, "architectures": [NAMES[family]], **fields}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


SMALL = {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 72, "head_dim": 10}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0, "partial_rotary_factor": 0.4}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("gptj", {}, {"numerics": "exact"}, "GPTJForCausalLM runs through .*, where --numerics exact .*fast"),
    ("bloom", {}, {}, "BloomForCausalLM cannot run .*ALiBi"),
    ("mpt", {}, {}, "MptForCausalLM cannot run .*ALiBi"),
    ("falcon", {"alibi": True}, {}, "config.json: alibi is True: positions by ALiBi"),
    ("mamba", {}, {}, "MambaForCausalLM cannot run .*keeps more of a sequence than keys and values"),
    ("bart", {}, {}, "BartForCausalLM cannot run .*one half of an encoder and a decoder"),
    ("bert", SMALL, {}, "BertSelfAttention is not causal"),
    ("xglm", {"d_model": 40, "attention_heads": 4, "ffn_dim": 72}, {}, "does not let its attention be replaced"),
    ("doge", SMALL, {}, "DogeAttention makes a mask of its own"),
    ("gptj", {"quantization_config": {"bits": 4}}, {}, "quantized checkpoints are not supported"),
    (
        "gptj",
        {"architectures": ["GPTNeoForCausalLM"]},
        {},
        "architecture GPTNeoForCausalLM .*'gptj', is not supported",
    ),
    (
        "gptj",
        {"model_type": "new"},
        {},
        "architecture GPTJForCausalLM in config.json, with model_type 'new', is not supported",
    ),
    ("gptj", {"architectures": ["NewForCausalLM"]}, {}, "architecture NewForCausalLM .*docs.models.md.*transformers"),
    ("gptj", {"n_embd": 16 * 10**6}, {}, r"weights for --max-model-len 2048 take \d{15,} bytes .* are free"),
    ("gptj", {}, {"max_model_len": 2049}, "--max-model-len 2049: the model supports at most 2048 positions"),
    ("gptj", {"n_positions": None}, {}, "transformers cannot read config.json: .*'n_positions'"),
    ("gptj", {"n_embd": -16}, {}, "cannot run through transformers here: its code fails: "),
    ("gpt_neox", {"dtype": ["bfloat16"]}, {}, r"config.json: dtype must be a text, not \['bfloat16'\]"),
    (
        "phi",
        {
            **SMALL,
            "qk_layernorm": True,
            "max_position_embeddings": 64,
            "rope_parameters": {**DYNAMIC, "original_max_position_embeddings": 32},
        },
        {},
        "--max-model-len 64: PhiForCausalLM .* 'dynamic' can serve 32 positions at most",
    ),
]


@pytest.mark.parametrize(
    ("family", "fields", "given", "message"), REFUSED, ids=[f"{row[0]}-{row[3][:40]}" for row in REFUSED]
)
def test_refused(tmp_path: Path, family: str, fields: dict[str, Any], given: dict[str, Any], message: str) -> None:
    config = options(config_folder(tmp_path, family, **fields), load_format="dummy", **given)
    with pytest.raises(LoaderError, match=message):
        load_model(config, make_device(config))


def test_incomplete_checkpoints(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a", "gptj", n_layer=1, num_hidden_layers=1)
    edit_config(folder, n_layer=2)
    with pytest.raises(LoaderError, match=r"^model folder \S+: tensor transformer.h.1.* is missing"):
        build_model(options(folder))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(LoaderError, match=r"^model folder \S+: no weights: .* pytorch_model.bin is not read"):
        build_model(options(folder))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("gpt2", "scale", 0.2), ("gemma2", "softcap", None), ("gemma2", "window", None), ("falcon", "scale", 1.0)],
)
def test_other_logits_are_found_at_start(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, field: str, value: Any
) -> None:
    """Loading compares with transformers' own attention: what we would get wrong is refused."""
    right = probe._layer

    def wrong(*arguments: Any) -> probe.LayerAttention:
        layer = right(*arguments)
        fields = {key: getattr(layer, key) for key in probe.LayerAttention.__dataclass_fields__}
        return probe.LayerAttention(**{**fields, field: value})

    monkeypatch.setattr(probe, "_layer", wrong)
    with pytest.raises(LoaderError, match="with Cadenza's attention its logits differ from transformers' own"):
        Served(folders[name])
