"""Adapters that are refused, each with the name of the field or tensor; and what does not change their hash."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from executor_svc.models.adapters.adapter import Adapter
from executor_svc.models.adapters.config import parse_config
from executor_svc.models.adapters.modules import decoder_modules
from executor_svc.models.adapters.reading import AdapterError, naming
from executor_svc.models.adapters.targets import find_targets
from executor_svc.models.base import ModelConfigError
from tests.checkpoints import make_checkpoint
from tests.executor_svc.models.model_configs import WRONG
from tests.helpers.models.peft_adapters import read, save_peft_adapter, spec_of

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
TABLE = "base_model.model.model.embed_tokens"
HANGS = r"(([\w.]|[\w.])+)+\1[A-Z]"
GROWS = "(?:(?:(?:a{1000}){1000}){1000}){1000}"
"""Compiled, it takes all memory."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "llama")


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the fields and tensors of an adapter that peft made, in numbers that bfloat16 holds."""
    folder = tmp_path_factory.mktemp("adapter")
    save_peft_adapter(base, folder, r=4, lora_alpha=6, target_modules=["q_proj", "o_proj", "embed_tokens"])
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "adapter_model.safetensors")
    return config, {name: t if "base_layer" in name else t.bfloat16().float() for name, t in tensors.items()}


Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]


def write(folder: Path, saved: tuple[dict[str, Any], dict[str, Tensor]], edit: Edit | None = None) -> Path:
    config, tensors = dict(saved[0]), dict(saved[1])
    if edit is not None:
        edit(config, tensors)
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def fields(**changed: Any) -> Edit:
    return lambda config, _: config.update(changed)


def without(name: str) -> Edit:
    return lambda _, tensors: tensors.__delitem__(name)


def also(name: str, *shape: int) -> Edit:
    return lambda _, tensors: tensors.update({name: torch.ones(shape)})


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Edit:
    return lambda _, tensors: tensors.update({name: change(tensors[name])})


def with_nan(tensor: Tensor) -> Tensor:
    result = tensor.clone()
    result[-1, -1] = float("nan")
    return result


REFUSED_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora is True: DoRA"),
    ({"lora_bias": True}, "lora_bias is True"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
    ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    ({"use_qalora": True}, "use_qalora"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    ({"target_parameters": ["mlp.weight"]}, "target_parameters"),
    ({"arrow_config": {"top_k": 3}}, "arrow_config"),
    ({"kasa_config": {"beta": 1.0}}, "kasa_config"),
    ({"monteclora_config": {"num_samples": 2}}, "monteclora_config"),
    ({"velora_config": {"scale": 1.0}}, "velora_config"),
    ({"megatron_config": {"tp": 1}}, "megatron_config"),
    ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16': .* changes the base's weights"),
    ({"init_lora_weights": "OLoRA"}, "init_lora_weights is 'OLoRA'"),
    ({"init_lora_weights": "corda"}, "init_lora_weights"),
    ({"init_lora_weights": "loftq"}, "init_lora_weights"),
    ({"init_lora_weights": "lora_ga"}, "init_lora_weights"),
    ({"init_lora_weights": "new"}, "init_lora_weights is 'new': not supported"),
    ({"bias": "lora_only"}, "bias is 'lora_only'"),
    ({"peft_type": "ADALORA"}, "peft_type is 'ADALORA'"),
    ({"peft_type": None}, "peft_type is missing"),
    ({"new_field": {"gate": 1}}, "new_field is .* does not know"),
    ({"modules_to_save": ["score"]}, "modules_to_save names 'score'"),
    ({"modules_to_save": ["lm_head"]}, "no weight of lm_head, which modules_to_save names"),
    ({"target_modules": None}, "target_modules is missing"),
    ({"target_modules": [1]}, "target_modules must be a list of names"),
    ({"target_modules": "(q_proj"}, r"target_modules has '\(q_proj', which is not a pattern"),
    ({"target_modules": HANGS}, "adapter_config.json: the pattern .* takes more than 1 s"),
    ({"target_modules": GROWS}, "target_modules has .* repeats multiply"),
    ({"rank_pattern": {GROWS: 4}}, "rank_pattern has .* repeats multiply"),
    ({"exclude_modules": GROWS}, "exclude_modules has .* repeats multiply"),
    ({"layers_to_transform": [0], "layers_pattern": GROWS}, "layers_pattern has .* repeats multiply"),
    ({"alpha_pattern": {"x" * 1001 + "+": 4}}, "alpha_pattern has a pattern of 1012 characters"),
    ({"rank_pattern": {f"a{i}": 4 for i in range(4097)}}, "rank_pattern has 4097 patterns"),
    ({"target_modules": "all-linear", "layers_to_transform": [0]}, "layers_to_transform cannot be used where"),
    ({"layers_pattern": "layers"}, "layers_pattern needs layers_to_transform"),
    ({"layers_to_transform": [0, 2]}, "layers_to_transform names layer 2: the model has 2 layers"),
    ({"layers_to_transform": -1}, "layers_to_transform must be"),
    ({"r": 0}, "r must be a positive integer"),
    ({"r": 65}, "gives model.embed_tokens a rank of 65: at most 64 .--max-lora-rank."),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern must hold positive integers"),
    ({"lora_alpha": float("nan")}, "lora_alpha must hold finite numbers"),
    ({"lora_alpha": 10**400}, "lora_alpha must hold finite numbers"),
    ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern must hold finite numbers"),
    ({"alpha_pattern": [8]}, "alpha_pattern must be an object"),
    ({"use_rslora": "yes"}, "use_rslora must be true or false"),
    ({"trainable_token_indices": [1, 1]}, "trainable_token_indices names a token twice"),
    ({"trainable_token_indices": {"wte": [1]}}, "trainable_token_indices names 'wte'"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices is about model.embed_tokens, which is a target"),
    ({"trainable_token_indices": {"lm_head": [1]}}, "no token_adapter.trainable_tokens_delta of lm_head"),
]

REFUSED_TENSORS: list[tuple[Edit, str]] = [
    (without(f"{Q0}.lora_B.weight"), f"tensor {Q0}.lora_A.weight is there, but there is no lora_B of model.layers.0"),
    (fields(target_modules="all-linear"), "there is no lora_A and lora_B of model.layers.0.self_attn.k_proj"),
    (fields(target_modules=["o_proj", "embed_tokens"]), f"tensor {Q0}.lora_A.weight: the config does not name model"),
    (fields(rank_pattern={"q_proj": 5}), rf"tensor {Q0}.lora_A.weight has shape \[4, 40\]; .* say \[5, 40\]"),
    (changed(f"{Q0}.lora_B.weight", lambda b: b[:-1]), rf"tensor {Q0}.lora_B.weight has shape \[39, 4\]"),
    (changed(f"{Q0}.lora_B.weight", with_nan), f"tensor {Q0}.lora_B.weight holds numbers that are not finite"),
    (changed(f"{Q0}.lora_A.weight", lambda a: a / 0), f"tensor {Q0}.lora_A.weight holds numbers that are not finite"),
    (changed(f"{Q0}.lora_A.weight", Tensor.double), f"tensor {Q0}.lora_A.weight is F64"),
    (changed(f"{Q0}.lora_A.weight", lambda a: a.to(torch.float8_e4m3fn)), f"tensor {Q0}.lora_A.weight is F8_E4M3"),
    (also(f"{Q0}.lora_B.bias", 40), f"tensor {Q0}.lora_B.bias: no LoRA adapter"),
    (also(f"{Q0}.lora_magnitude_vector", 40), "lora_magnitude_vector: no LoRA adapter"),
    (also(f"{Q0}.weight", 40, 40), f"tensor {Q0}.weight: whole weights are supported of embed_tokens and lm_head"),
    (
        also(Q0.replace("q_proj", "qkv_proj") + ".lora_A.weight", 4, 40),
        "no linear or table model.layers.0.self_attn.qkv_",
    ),
    (also(Q0.replace("layers.0", "layers.2") + ".lora_A.weight", 4, 40), "layers.2.* the model has 2 layers"),
    (also("base_model.model.model.norm.weight", 40), "no linear or table model.norm "),
    (also(f"{Q0}.lora_A.other.weight", 4, 40), "are of one module"),
    (also(f"{Q0}.lora_embedding_A", 4, 40), "self_attn.q_proj is no table of embeddings"),
    (also(f"{TABLE}.weight", 131, 40), "are of one table"),
    (also("lm_head.token_adapter.trainable_tokens_delta", 1, 40), "trainable_token_indices does not name lm_head"),
    (
        changed(f"{TABLE}.base_layer.weight", lambda table: table + 1),
        "base_layer.weight has over 100 rows that are not",
    ),
    (changed(f"{TABLE}.base_layer.weight", lambda table: table[:-1]), r"base_layer.weight has shape \[130, 40\]"),
    (also("x" * 600, 1), "a name of 600 characters"),
]


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize(("edit", "message"), [*((fields(**f), m) for f, m in REFUSED_FIELDS), *REFUSED_TENSORS])
def test_what_is_not_exact_or_not_there_is_refused_by_name(
    base: Path, saved: Any, edit: Edit, message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, saved, edit)
    with pytest.raises(AdapterError, match=f"adapter {tmp_path}: .*{message}"):
        read(base, folder, max_token_rows=100)


def test_two_adapters_in_one_file_are_refused(base: Path, saved: Any, tmp_path: Path) -> None:
    def edit(_: Any, tensors: dict[str, Tensor]) -> None:
        for number, name in enumerate(list(tensors)):
            tensors[name.replace("lora_A.", f"lora_A.name{number}.")] = tensors.pop(name)

    with pytest.raises(AdapterError, match="are of two adapters"):
        read(base, write(tmp_path, saved, edit))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_config.json", None, "adapter_config.json is missing"),
        ("adapter_config.json", b"[" * 100_000, "adapter_config.json cannot be read"),
        ("adapter_config.json", b"[1]", "adapter_config.json holds no JSON object"),
        ("adapter_config.json", b" " * (5 << 20), "adapter_config.json has more than 4194304 bytes"),
        ("adapter_model.safetensors", None, "adapter_model.bin is not read"),
        ("adapter_model.safetensors", b"\x02\0\0\0\0\0\0\0{", "not a readable safetensors file"),
        ("adapter_model.safetensors", b"\xff\xff\xff\x7f\0\0\0\0{}", "a header of 2147483647 bytes"),
    ],
)
def test_files_that_cannot_be_read(
    base: Path, saved: Any, name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, saved)
    (folder / "adapter_model.bin").touch()
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(AdapterError, match=message):
        read(base, folder)


def test_a_file_that_is_replaced_meanwhile_is_an_error(
    base: Path, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from executor_svc.models.adapters import reading

    def whole(tensor: Any) -> Tensor:
        if tensor.name == f"{Q0}.lora_A.weight":
            write(tmp_path, saved)
        return tensor.whole()

    monkeypatch.setattr(reading, "_whole", whole)
    with pytest.raises(AdapterError, match="was changed while it was read"):
        read(base, write(tmp_path, saved))


def renamed(old: str, new: str) -> Edit:
    def edit(_: Any, tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    return edit


def as_bfloat16(_: Any, tensors: dict[str, Tensor]) -> None:
    tensors.update({name: t.bfloat16() for name, t in tensors.items() if "base_layer" not in name})


SAME: list[Edit] = [
    fields(),
    renamed("base_model.model.", ""),
    renamed("base_model.model.", "_orig_mod.base_model.model."),
    renamed("lora_A.", "lora_A.default."),
    renamed("lora_embedding_B", "lora_embedding_B.default"),
    as_bfloat16,
    without(f"{TABLE}.base_layer.weight"),
    fields(lora_alpha=3, use_rslora=True),
    fields(r=64, rank_pattern={r"._proj|embed_tokens": 4}, alpha_pattern={"q_proj": 6, r".*": 6}, lora_alpha=1),
    fields(target_modules=r"model\.(layers\..*\.(q|o)_proj|embed_tokens)", layers_to_transform=None),
    fields(base_model_name_or_path="other", lora_dropout=0.5, init_lora_weights="eva", revision="x", future=None),
]

OTHER: list[Edit] = [
    fields(lora_alpha=7),
    fields(use_rslora=True),
    fields(alpha_pattern={"layers.1.self_attn.o_proj": 5}),
    changed(f"{Q0}.lora_A.weight", lambda a: a * 2),
    changed(f"{Q0}.lora_B.weight", lambda b: b.flip(0)),
    changed(f"{TABLE}.lora_embedding_A", lambda a: a.flip(1)),
    changed(f"{TABLE}.base_layer.weight", lambda t: torch.cat([t[:-1], t[-1:] + 1])),
]


def test_the_hash_is_of_what_is_computed(base: Path, saved: Any, tmp_path: Path) -> None:
    def read_with(number: int, edit: Edit) -> Adapter:
        return read(base, write(tmp_path / str(number), saved, edit))

    first = read(base, write(tmp_path / "first", saved))
    same = [read_with(number, edit) for number, edit in enumerate(SAME)]
    assert [adapter.content_hash for adapter in same] == [first.content_hash] * len(SAME)
    hashes = {read_with(number, edit).content_hash for number, edit in enumerate(OTHER, len(SAME))}
    assert len(hashes | {first.content_hash}) == len(OTHER) + 1


def test_sizes(base: Path, saved: Any, tmp_path: Path) -> None:
    adapter = read(base, write(tmp_path, saved))
    pairs = 2 * 2 * (4 * 40 + 40 * 4)  # two layers, q and o
    assert adapter.num_bytes == 4 * (pairs + 4 * 131 + 4 * 40)
    assert adapter.max_rank == 4


def test_hundreds_of_patterns_are_quick(base: Path, saved: Any, tmp_path: Path) -> None:
    """EVA writes one for each module; the limit of time is for regular expressions."""
    many = {f"model.layers.{layer}.self_attn.{name}_proj": 3 for layer in range(2, 500) for name in "qkvo"}
    began = time.thread_time()
    adapter = read(base, write(tmp_path, saved, fields(rank_pattern=many, alpha_pattern=many)))
    assert time.thread_time() - began < 1
    assert adapter.max_rank == 4


ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    10**400,
    "",
    "x",
    "(",
    [],
    [None],
    [[]],
    ["q_proj"],
    {},
    {"q_proj": []},
    {"": {}},
]


def test_odd_values_of_any_field_are_read_or_refused(base: Path, saved: Any) -> None:
    spec = spec_of(base)
    refused = 0
    for field in saved[0]:
        for value in ODD:
            with suppress(AdapterError), naming(base):
                refused += 1
                find_targets(parse_config({**saved[0], field: value}), decoder_modules(spec), spec.tied)
                refused -= 1
    assert refused > 100


def test_any_value_of_any_field_is_read_or_refused_in_one_line(saved: tuple[dict[str, Any], dict[str, Tensor]]) -> None:
    fields, _ = saved
    messages = []
    for name, value in itertools.product([*fields, "unknown"], WRONG):
        try:
            parse_config(fields | {name: value})
        except ModelConfigError as error:
            messages.append(str(error))
    assert len(messages) > 300
    for message in messages:
        assert message.startswith("adapter_config.json: ")
        assert len(message) < 500
        assert message.isprintable()


def test_experts_of_mixtures_are_refused_by_name(tmp_path: Path) -> None:
    module = "experts.3.gate_proj"
    base, folder = make_checkpoint(tmp_path / "base", "qwen2_moe"), tmp_path / "adapter"
    save_peft_adapter(base, folder, r=4, target_modules=["q_proj"])
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    tensors, name = load_file(folder / "adapter_model.safetensors"), f"model.layers.0.mlp.{module}"
    more = {f"base_model.model.{name}.lora_{each}.weight": torch.ones(4, 4) for each in "AB"}
    config["target_modules"].append(module.rpartition(".")[2])
    with pytest.raises(AdapterError, match=rf"tensor base_model.+: {name} is of experts, of which rows choose some"):
        read(base, write(folder, (config, tensors | more)))
