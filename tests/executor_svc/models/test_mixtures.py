"""Mixtures of experts: what is refused and by which name, what is read and how, and models that share no kernels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.cpu.kernels.quantized.launches import PackedWeightPart
from executor_svc.models.adapters.modules import decoder_modules
from executor_svc.models.base import ModelConfigError
from executor_svc.models.folder import LoaderError
from tests.checkpoints import MIXTURES, make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.models.model_configs import read
from tests.golden.test_mixtures import CASES
from tests.helpers.models.golden import check_bits_of_chunks, random_prompts

BESIDE = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"num_experts": 2**40}, "num_experts must be at most 4096"),
    ("qwen3_moe", {"num_experts": -1}, "num_experts must be a positive integer, not -1"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts to choose"),
    ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size must be a positive integer, not 0"),
    ("qwen3_moe", {"mlp_only_layers": "all"}, "mlp_only_layers must be a list of layers"),
    ("qwen3_moe", {"mlp_only_layers": [0, True]}, "mlp_only_layers must be a list of layers"),
    ("qwen3_moe", {"mlp_only_layers": {}}, "mlp_only_layers must be a list of layers"),
    ("deepseek_v3", {"num_key_value_heads": -1}, "num_key_value_heads must be a positive integer, not -1"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer, not 0"),
    ("qwen2_moe", {"shared_expert_intermediate_size": "9"}, "shared_expert_intermediate_size must be a positive int"),
    ("glm4_moe", {"n_group": 3}, "n_group 3 does not divide the number of experts, 8"),
    ("glm4_moe", {"n_group": 2, "topk_group": 3}, "topk_group 3 is more than n_group 2"),
    ("glm4_moe", {"n_group": 8}, "num_experts_per_tok 2 is more than the 1 experts to choose"),
    ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor must be a number above 0, not 0"),
    ("glm4_moe", {"n_shared_experts": -1}, "n_shared_experts must be a positive integer, not -1"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported; supported: greedy, group"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported; supported: softmax"),
    ("deepseek_v2", {"mlp_bias": True}, "mlp_bias is True: biases of the MLP are not supported"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported; supported: noaux_tc"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer, not 0"),
    ("deepseek_v3", {"q_lora_rank": -1}, "q_lora_rank must be a positive integer, not -1"),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd; rotary embedding needs an even one"),
    ("deepseek_v3", {"v_head_dim": "8"}, "v_head_dim must be a positive integer, not '8'"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq other than 1 is not supported"),
    ("deepseek_v3", {"index_topk": 2048}, "index_topk is 2048: attention to keys that an indexer chooses is not supp"),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list with num_hidden_layers 6 entr"),
    ("glm4_moe_lite", {"mlp_layer_types": ["moe"] * 6}, "mlp_layer_types 'moe' is not supported; supported: dense, s"),
    (
        "mistral4",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.9}},
        "rope_parameters.partial_rotary_factor 0.9 must be qk_rope_head_dim / head size, 0.5",
    ),
    (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1e9}},
        "rope_parameters.mscale_all_dim 1e+09 must be at most 1e+06",
    ),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0: clipped queries, keys and values are not supported"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts must be a positive integer, not 0"),
    ("qwen3_moe", {"num_experts": "8"}, "num_experts must be a positive integer, not '8'"),
    ("qwen3_moe", {"num_experts_per_tok": 65, "num_experts": 128}, "num_experts_per_tok must be at most 64, not 65"),
    ("mixtral", {"num_experts": None, "num_local_experts": []}, "num_local_experts must be a positive integer, not []"),
    ("glm4_moe", {"n_group": 0}, "n_group must be a positive integer, not 0"),
    ("gemma4_text", {**BESIDE, "top_k_experts": 9}, "top_k_experts 9 is more than the 8 experts to choose"),
    ("gemma4_text", {**BESIDE, "num_experts": None}, "num_experts must be a positive integer, not None"),
    ("gemma4_text", {**BESIDE, "moe_intermediate_size": None}, "moe_intermediate_size must be a positive integer"),
    ("gemma4_text", {"enable_moe_block": 1}, "enable_moe_block must be true or false, not 1"),
    ("llama4_text", {"moe_layers": [0, 6]}, "moe_layers must be a list of layers from 0 to 5, not [0, 6]"),
    ("llama4_text", {"moe_layers": "all"}, "moe_layers must be a list of layers from 0 to 5, not 'all'"),
    ("llama4_text", {"moe_layers": None, "interleave_moe_layer_step": 0}, "interleave_moe_layer_step must be a pos"),
    ("llama4_text", {"moe_layers": [1], "num_local_experts": 0}, "num_local_experts must be a positive integer, not 0"),
    ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok must be 2, which this router chooses, not 3"),
    ("phimoe", {"router_jitter_noise": -1}, "router_jitter_noise must be a number of at least 0, not -1"),
    ("exaone_moe", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types must be a list of dense and sparse with num_hid"),
    ("exaone_moe", {"mlp_layer_types": ["sparse"] * 5 + [3]}, "mlp_layer_types must be a list of dense and sparse"),
    ("granitemoe_swa", {"shared_intermediate_size": -3}, "shared_intermediate_size must be a positive integer, not -3"),
    ("hunyuan_v1_moe", {"num_experts_per_tok": None, "moe_topk": [1, 2]}, "moe_topk must have num_hidden_layers 6 ent"),
    ("hunyuan_v1_moe", {"num_experts": [4] * 5 + [6]}, "num_experts [4, 4, 4, 4, 4, 6] differs between layers, which"),
    ("hunyuan_v1_moe", {"num_experts_per_tok": None, "moe_topk": [2] * 5 + ["2"]}, "moe_topk must be a positive integ"),
    ("hunyuan_v1_moe", {"num_shared_expert": [0] * 6}, "num_shared_expert must be a positive integer, not 0"),
]


@pytest.mark.parametrize(("family", "fields", "message"), REFUSED, ids=[f"{f}-{m[:40]}" for f, _, m in REFUSED])
def test_refused(family: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=f"^config.json: .*{re.escape(message)}"):
        read(family, **fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("mixture"), "glm4_moe")


def copy(folder: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


EXPERTS = "model.layers.2.mlp.experts"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{EXPERTS}.5.up_proj.weight"), r"experts\.5\.up_proj\.weight is missing"),
        (lambda tensors: tensors.pop("model.layers.2.mlp.gate.weight"), r"mlp\.gate\.weight is missing"),
        (
            lambda tensors: tensors.update({"model.layers.2.mlp.gate.weight": torch.ones(7, 40)}),
            r"mlp\.gate\.weight has shape \[7, 40\], config.json says \[8, 40\]",
        ),
        (
            lambda tensors: tensors.update({"model.layers.2.mlp.gate.e_score_correction_bias": torch.ones(9)}),
            r"e_score_correction_bias has shape \[9\], config.json says \[8\]",
        ),
        (
            lambda tensors: tensors.update({f"{EXPERTS}.8.up_proj.weight": torch.ones(24, 40)}),
            r"1 tensors that the model does not use: model\.layers\.2\.mlp\.experts\.8\.up_proj\.weight",
        ),
        (
            lambda tensors: tensors.update({f"{EXPERTS}.3.down_proj.weight": torch.ones(40, 25)}),
            r"experts\.3\.down_proj\.weight has shape \[40, 25\], config.json says \[40, 24\]",
        ),
    ],
)
def test_tensors_that_are_not_those_of_the_config(folder: Path, tmp_path: Path, change: Any, message: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    with pytest.raises(LoaderError, match=message):
        Model(copy(folder, tmp_path / "changed", tensors))


@pytest.mark.parametrize("count", [8, 7, 9])
def test_a_tensor_may_have_the_matrices_of_all_experts(folder: Path, tmp_path: Path, count: int) -> None:
    """As those of Qwen3.5 and Granite; of more or fewer experts it is refused."""
    tensors = load_file(folder / "model.safetensors")
    (prompt,) = random_prompts(131, (30,))
    wanted = Model(folder).whole(prompt)
    for layer in (1, 2):
        for name in ("gate_proj", "up_proj", "down_proj"):
            prefix = f"model.layers.{layer}.mlp.experts"
            matrices = [tensors.pop(f"{prefix}.{expert}.{name}.weight") for expert in range(8)]
            tensors[f"{prefix}.{name}.weight"] = torch.stack([*matrices, matrices[0]][:count])
    changed = copy(folder, tmp_path / "changed", tensors)
    if count == 8:
        assert torch.equal(Model(changed).whole(prompt), wanted)
        return
    with pytest.raises(LoaderError, match=r"has shape \[[79], 40, 24\], config.json says \[8, 40, 24\]"):
        Model(changed)


@pytest.mark.parametrize("name", ["gpt_oss", "granitemoe", "gemma4", "llama4"])
def test_a_tensor_of_other_experts_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Of one expert less, or with the matrix of each turned."""
    family, shape = CASES[name]
    folder = make_checkpoint(tmp_path / "made", family, **shape)
    tensors = load_file(folder / "model.safetensors")
    stack = next(each for each, tensor in tensors.items() if tensor.ndim == 3)
    for index, changed in enumerate((tensors[stack][1:], tensors[stack].transpose(1, 2))):
        with pytest.raises(
            LoaderError, match=rf"tensor {re.escape(stack)} has shape \[.+\], config.json says \[.+\] for all exp"
        ):
            Model(copy(folder, tmp_path / str(index), tensors | {stack: changed.contiguous()}))


def test_tensors_may_be_in_the_form_of_qwen3_5(folder: Path, tmp_path: Path) -> None:
    """Gate and up of all experts in one tensor, not turned, gate's rows first."""
    tensors = load_file(folder / "model.safetensors")
    (prompt,) = random_prompts(131, (30,))
    wanted = Model(folder).whole(prompt)
    for layer in (1, 2):
        gate, up, down = (
            torch.stack([tensors.pop(f"model.layers.{layer}.mlp.experts.{each}.{name}.weight") for each in range(8)])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    assert torch.equal(Model(copy(folder, tmp_path / "changed", tensors)).whole(prompt), wanted)


def test_old_files_of_scout_have_a_number_for_true() -> None:
    assert read("llama4_text", attn_temperature_tuning=4) == read("llama4_text", attn_temperature_tuning=True)
    assert read("llama4_text", attn_temperature_tuning=False) != read("llama4_text")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "minimax_m2", "llama4_text"])
def test_families_without_groups_have_none(family: str) -> None:
    layers = {"moe_layers": [1]} if family == "llama4_text" else {}
    assert read(family, **layers, n_group=2, topk_group=9) == read(family, **layers)


def test_files_of_hunyuan_have_counts_and_sizes_by_layer() -> None:
    """As those of A13B."""
    numbers = {"num_experts": 5, "num_experts_per_tok": None, "moe_topk": 2, "moe_intermediate_size": 32}
    lists = {name: [value] * 6 for name, value in numbers.items() if value}
    spec = read("hunyuan_v1_moe", **numbers | lists, num_shared_expert=[1] * 6)
    assert spec == read("hunyuan_v1_moe", **numbers)
    experts = spec.layers[3].experts
    assert experts is not None
    assert (experts.router.num_chosen, experts.intermediate_size) == (2, 32)
    assert experts.shared_size == spec.intermediate_size


def test_a_head_of_multi_token_prediction_of_ernie_is_left_alone(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "made", "ernie4_5_moe")
    (prompt,) = random_prompts(131, (20,))
    tensors = load_file(folder / "model.safetensors")
    more = ("mtp_block.0.self_attn.q_proj", "mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0")
    tensors |= {f"model.{name}.weight": torch.ones(3, 3) for name in more}
    assert torch.equal(Model(copy(folder, tmp_path / "changed", tensors)).whole(prompt), Model(folder).whole(prompt))


def test_a_tensor_under_both_of_its_names_is_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.e_score_correction_bias"] = torch.ones(8)
    with pytest.raises(
        LoaderError, match=r"tensors model\.layers\.2\.mlp\.e_score.* and model\.layers\.2\.mlp\.gate\.e_s"
    ):
        Model(copy(folder, tmp_path / "changed", tensors))


def unasked(folder: Path, target: Path) -> Path:
    """Write a mixture whose experts 2 and 3, a group, are never chosen, and whose rows all choose experts 4 and 5."""
    tensors = load_file(folder / "model.safetensors")
    for layer in (1, 2):
        bias = tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        bias[2:4], bias[4:6] = -100.0, 100.0
    return copy(folder, target, tensors)


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str)
def test_nan_in_an_expert_that_nobody_asks_reaches_no_row(folder: Path, tmp_path: Path, options: Any) -> None:
    """All rows share two experts, in bf16, in chunks and beside others."""
    model = Model(unasked(folder, tmp_path / "changed"), dtype="bfloat16", **options)
    (prompt,) = random_prompts(131, (40,))
    expected = model.whole(prompt)
    decoder: Any = model.loaded.model
    spoilt = 0
    for layer in decoder._layers[1:]:
        for linear in (layer.mlp._gate_up, layer.mlp._down):
            for expert in (2, 3):
                for part in linear._weights._linears[expert].parts:
                    memory = part.packed if isinstance(part, PackedWeightPart) else part.panels
                    memory.view(torch.uint8).fill_(0xFF)
                    spoilt += 1
    assert spoilt >= 8
    assert torch.equal(model.whole(prompt), expected)
    check_bits_of_chunks(model)


def test_the_bias_of_the_choice_stays_in_float32(folder: Path, tmp_path: Path) -> None:
    """Two experts are equal but for a bias that is smaller than bfloat16's step."""
    tensors = load_file(folder / "model.safetensors")
    for layer in (1, 2):
        bias, gate = (f"model.layers.{layer}.mlp.gate.{name}" for name in ("e_score_correction_bias", "weight"))
        tensors[bias] = torch.full((8,), 1.0)
        tensors[bias][7] += 2**-12
        tensors[gate][:] = 0.0
    chosen = Model(copy(folder, tmp_path / "changed", tensors), dtype="bfloat16")
    tensors = {
        name: torch.zeros_like(tensor) if ".experts." in name and ".7." not in name and ".0." not in name else tensor
        for name, tensor in tensors.items()
    }
    (prompt,) = random_prompts(131, (9,))
    alike = Model(copy(folder, tmp_path / "without", tensors), dtype="bfloat16")
    assert torch.equal(chosen.whole(prompt), alike.whole(prompt)), "experts beside 7 and 0 were chosen"


def test_a_checkpoint_with_nan_in_an_expert_is_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{EXPERTS}.3.down_proj.weight"][0, 0] = float("nan")
    with pytest.raises(LoaderError, match=r"hold NaN or infinite numbers: .*experts\.3\.down_proj"):
        Model(copy(folder, tmp_path / "changed", tensors))


@pytest.mark.parametrize("family", MIXTURES)
def test_adapters_change_all_but_experts(family: str) -> None:
    spec = read(family)
    modules = decoder_modules(spec)
    inner = {"attention.latents", "attention.queries"} if spec.has_latents else {"attention.qkv"}
    assert {module.linear for module in modules.values()} >= {*inner, "attention.output", "lm_head", None}
    assert not any(".experts." in name for name in modules)
    shares = any(layer.experts is not None and layer.experts.shared_size for layer in spec.layers)
    assert any(module.linear == "shared.down" for module in modules.values()) == shares


def test_what_a_token_does_not_read() -> None:
    """Of Qwen3-30B-A3B 3.3 of 30.5 billion parameters are read."""
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48}
    spec = read("qwen3_moe", num_experts=128, num_experts_per_tok=8, **sizes)
    assert spec.num_unchosen_elements == 48 * 120 * 3 * 2048 * 768
    assert read("qwen3").num_unchosen_elements == 0
