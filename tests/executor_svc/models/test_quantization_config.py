"""quantization_config: what is read, what is refused by name, and broken values and tensors of every kind."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from executor_svc.device.dense_rows import DequantizedRows
from executor_svc.device.stored_linear import QuantRows
from executor_svc.models.files.checkpoint import SafetensorsWeights
from executor_svc.models.folder import LoaderError
from executor_svc.models.quantized.compressed_tensors import CompressedTensors
from executor_svc.models.quantized.gptq import Gptq
from executor_svc.models.quantized.method import Quantization, read_quantization
from tests.checkpoints import edit_config, make_llama
from tests.executor_svc.driver import Model
from tests.helpers.models.quantized_layouts import LAYOUTS

CPU = torch.device("cpu")
HERE = Path(__file__).parent / "quantized_files"
NAMES = sorted(path.stem for path in HERE.glob("*.safetensors"))
SHAPE = (32, 64)

KV_ALONE = {
    "quant_method": "compressed-tensors",
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "config_groups": {"group_0": {"targets": [], "weights": None}},
}
W4 = LAYOUTS["w4a16"][0]
GROUP_0 = W4["config_groups"]["group_0"]


def read(config: Any) -> Quantization | None:
    return read_quantization(HERE, {"quantization_config": config})


def changed_weights(**fields: Any) -> dict[str, Any]:
    group = GROUP_0 | {"weights": GROUP_0["weights"] | fields}
    return W4 | {"config_groups": {"group_0": group}}


@functools.cache
def config_of(name: str) -> Any:
    with safe_open(HERE / f"{name}.safetensors", framework="pt") as file:
        return json.loads(file.metadata()["quantization_config"])


def load(folder: Path, config: Any, shape: tuple[int, int] = SHAPE) -> Tensor:
    """Return the linear of a folder's file, as float32."""
    weights = SafetensorsWeights(folder, torch.float32, CPU, read(config))
    rows = weights.open_linear("linear", shape)
    assert isinstance(rows, QuantRows)
    return DequantizedRows(rows, torch.float32, CPU).whole()


REFUSED: list[tuple[Any, str]] = [
    ({"bits": 4}, "quant_method is missing"),
    ({"load_in_4bit": True}, "quant_method is 'bitsandbytes': not supported"),
    *(
        ({"quant_method": name}, f"quant_method is '{name}': not supported")
        for name in ("bitsandbytes", "torchao", "hqq", "eetq", "quanto", "aqlm", "higgs", "modelopt", "auto-round")
    ),
    (KV_ALONE | {"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_method is 'modelopt': not supported"),
    ({"quant_method": "mxfp4"}, "quant_method is 'mxfp4': it is known for the experts of gpt-oss alone"),
    ({"quant_method": "quark"}, "quant_method is 'quark': not supported"),
    ({"quant_method": "exl2"}, "quant_method is 'exl2': not supported"),
    (W4 | {"ignore": ["re:" + "a" * 1001]}, "ignore has a pattern of 1001 characters"),
    ({"quant_method": "bitsandbytes"}, "Use the dense checkpoint, with --quantization"),
    ([4], "quantization_config must be an object"),
    ({"quant_method": "gptq", "group_size": 128}, "quantization_config.bits must be a positive integer, not None"),
    *(
        ({"quant_method": "gptq", "bits": bits, "group_size": 128}, f"bits is {bits}: integers of 4 and 8 bits are")
        for bits in (2, 3, 5)
    ),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be a positive integer, not 0"),
    ({"quant_method": "gptq", "bits": 4, "group_size": -2}, "group_size must be a positive integer, not -2"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 10**12}, "group_size must be at most"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"}, "'marlin': not supported"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "is_marlin_format": True}, "is_marlin_format is true"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"+:(": {}}}, "which is not a pattern"),
    ({"quant_method": "awq", "bits": 8, "group_size": 128}, "bits is 8: AWQ is supported with 4 bits"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version is 'gemv': not supported"),
    ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "must be [rows, columns] of a block, not [128, 0]"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2': not supported"),
    (changed_weights(num_bits=3), "config_groups.group_0.weights.num_bits is 3: integers of 4 and 8 bits"),
    (changed_weights(strategy="tensor_group"), "weights.strategy is 'tensor_group': not supported"),
    (changed_weights(strategy="group", group_size=None), "weights.group_size must be a positive integer"),
    (changed_weights(type="float"), "weights.type is float in pack-quantized"),
    (W4 | {"format": "marlin-24"}, "format is 'marlin-24': not supported"),
    (W4 | {"format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized': not supported"),
    (W4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config names sparse weights"),
    (W4 | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config names transforms"),
    (W4 | {"config_groups": {}}, "config_groups is empty"),
    (W4 | {"ignore": "lm_head"}, "ignore must be a list of texts"),
    (W4 | {"ignore": ["re:a{99999999999}"]}, "whose repeats multiply to too many"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(LoaderError) as error:
        read(config)
    assert str(error.value).startswith(f"model folder {HERE}: config.json: ")
    assert message in str(error.value)


def test_the_format_of_mlx_is_refused_by_name() -> None:
    with pytest.raises(LoaderError, match=r"config[.]json: quantization is that of MLX: not supported"):
        read_quantization(HERE, {"quantization": {"group_size": 64, "bits": 4}})


@pytest.mark.parametrize("name", NAMES)
def test_scales_that_are_not_finite_are_errors(name: str, tmp_path: Path) -> None:
    tensors = load_file(HERE / f"{name}.safetensors")
    (key,) = [key for key in tensors if key.endswith(("scale", "scales"))]
    bad = [255] if tensors[key].dtype == torch.uint8 else [float("nan"), float("inf")]
    for value in bad:
        broken = tensors[key].clone()
        broken.view(-1)[-1] = value
        save_file(tensors | {key: broken}, tmp_path / "model.safetensors")
        with pytest.raises(LoaderError, match=f"tensor {key} has scales that are NaN or infinite"):
            load(tmp_path, config_of(name))


@pytest.mark.parametrize("name", [name for name in NAMES if "fp8" in name or "float" in name])
def test_codes_of_fp8_that_are_nan_are_errors(name: str, tmp_path: Path) -> None:
    tensors = load_file(HERE / f"{name}.safetensors")
    (key,) = [key for key, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]
    for code in (0x7F, 0xFF):
        broken = tensors[key].clone()
        broken.view(torch.uint8)[-1, -1] = code
        save_file(tensors | {key: broken}, tmp_path / "model.safetensors")
        with pytest.raises(LoaderError, match=f"tensor {key} holds NaN"):
            load(tmp_path, config_of(name))


def test_groups_of_columns_out_of_range_are_errors_with_one_group_too(tmp_path: Path) -> None:
    shutil.copy(HERE / "gptq_4.safetensors", tmp_path / "model.safetensors")
    tensors = load_file(HERE / "gptq_4.safetensors")
    one = {key: tensors[key][:1].clone() for key in ("linear.scales", "linear.qzeros")}
    for group, fits in ((0, True), (-1, True), (1, False), (7, False)):
        save_file(tensors | one | {"linear.g_idx": torch.full((64,), group).int()}, tmp_path / "model.safetensors")
        config = config_of("gptq_4") | {"group_size": -1}
        if fits:
            assert load(tmp_path, config).shape == SHAPE
        else:
            with pytest.raises(LoaderError, match=r"tensor linear[.]g_idx does not give 64 columns to each group"):
                load(tmp_path, config)


def test_quantized_keys_and_values_alone_leave_linears_dense() -> None:
    assert read(KV_ALONE) is None
    assert read(KV_ALONE | {"quant_method": "modelopt", "quant_algo": None}) is None
    assert read(None) is None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMM", "zero_point": True}),
    ],
)
def test_options_of_old_files(tmp_path: Path, file: str, content: dict[str, Any]) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    quantization: Any = read_quantization(tmp_path, {})
    assert "group=128" in repr(quantization)
    (tmp_path / file).write_text(json.dumps(content | {"bits": 3}))
    with pytest.raises(LoaderError, match=f"{file}: bits is 3"):
        read_quantization(tmp_path, {})


def test_options_of_the_text_part(tmp_path: Path) -> None:
    """As in Kimi K2.5."""
    section = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}}
    assert read_quantization(tmp_path, {"text_config": section}) == read_quantization(tmp_path, section) is not None


def test_targets_and_ignored_modules() -> None:
    eight = GROUP_0 | {"weights": GROUP_0["weights"] | {"num_bits": 8}}
    sixteen = GROUP_0 | {"weights": GROUP_0["weights"] | {"group_size": 16}}
    config = W4 | {
        "config_groups": {
            "group_0": GROUP_0,
            "group_1": eight | {"targets": ["re:.*down_proj$"]},
            "group_2": sixteen | {"targets": ["model.layers.1.mlp.down_proj"]},
            "group_3": {"targets": ["re:.*o_proj"], "weights": None},
        },
        "ignore": ["lm_head", "re:model[.]layers[.]0[.].*q_proj"],
    }
    quantization = read(config)
    assert isinstance(quantization, CompressedTensors)
    schemes: dict[str, Any] = {
        name: quantization.scheme_of(name)
        for name in (
            "lm_head", "model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj",
            "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.o_proj",
            "model.embed_tokens_per_layer",
        )
    }  # fmt: skip
    found = [None if scheme is None else (scheme.bits, scheme.grouping.size[1]) for scheme in schemes.values()]
    assert found == [None, None, None, (4, 32), (8, 32), (4, 16), None, None]


def test_of_overlapping_patterns_the_first_by_its_letters_counts() -> None:
    """As match_targets of compressed-tensors sorts them, in whatever order the groups are."""
    eight = GROUP_0 | {"weights": GROUP_0["weights"] | {"num_bits": 8}, "targets": ["re:.*down_proj$", "Module"]}
    sixteen = GROUP_0 | {"weights": GROUP_0["weights"] | {"group_size": 16}, "targets": ["re:.*[.]mlp[.].*", "Linear"]}
    groups = {"group_0": eight, "group_1": sixteen}
    for ordered in (groups, dict(reversed(groups.items()))):
        quantization = read(W4 | {"config_groups": ordered, "ignore": []})
        assert isinstance(quantization, CompressedTensors)
        down: Any = quantization.scheme_of("model.layers.0.mlp.down_proj")  # "[" precedes "d"
        assert (down.bits, down.grouping.size[1]) == (4, 16)
        q: Any = quantization.scheme_of("model.layers.0.self_attn.q_proj")  # Linear precedes Module
        assert (q.bits, q.grouping.size[1]) == (4, 16)


def test_one_target_in_two_groups() -> None:
    eight = GROUP_0 | {"weights": GROUP_0["weights"] | {"num_bits": 8}, "targets": ["re:.*down_proj$", "Linear"]}
    problem = r"config_groups.group_1.targets has 'Linear', as has group_0 with another scheme: which one counts is op"
    with pytest.raises(LoaderError, match=problem):
        read(W4 | {"config_groups": {"group_0": GROUP_0, "group_1": eight}})
    same = GROUP_0 | {"targets": ["Linear", "re:x"]}
    assert read(W4 | {"config_groups": {"group_0": GROUP_0, "group_1": same}}) is not None


def test_options_of_single_linears_of_gptqmodel() -> None:
    dynamic = {"-:.*q_proj": {}, r"+:.*\.1\..*down_proj": {"bits": 8, "group_size": -1}}
    quantization = read({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic})
    assert isinstance(quantization, Gptq)
    ((pattern, kind),) = quantization.overrides
    assert (kind.bits, kind.group) == (8, None)
    assert pattern.match("model.layers.1.mlp.down_proj")


def test_a_dense_linear_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    dense = torch.randn(SHAPE)
    save_file({"lm_head.weight": dense}, tmp_path / "model.safetensors")
    for config, _ in LAYOUTS.values():
        rows = SafetensorsWeights(tmp_path, torch.float32, CPU, read(config)).open_linear("lm_head", SHAPE)
        assert not isinstance(rows, QuantRows)
        assert torch.equal(rows.whole(), dense)


Change = Callable[[Tensor], Tensor | None]
BROKEN: dict[str, Change] = {
    "missing": lambda tensor: None,
    "a row more": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "a column less": lambda tensor: tensor.flatten()[:-1].clone(),
    "a dimension more": lambda tensor: tensor.unsqueeze(0).unsqueeze(0).repeat(2, 1, *[1] * tensor.dim()),
    "another dtype": lambda tensor: tensor.to(torch.float64),
}
NOT_CHECKED = {("missing", "g_idx"), ("missing", "weight_shape")}
"""Tensors that may be absent."""


@pytest.mark.slow
@pytest.mark.parametrize("change", BROKEN)
@pytest.mark.parametrize("name", NAMES)
def test_a_broken_tensor_is_an_error_that_names_it(name: str, change: str, tmp_path: Path) -> None:
    whole = load_file(HERE / f"{name}.safetensors")
    for key, tensor in whole.items():
        last = key.removeprefix("linear.")
        if key == "expected" or (change, last) in NOT_CHECKED or (change == "another dtype" and tensor.dim() == 0):
            continue
        broken = BROKEN[change](tensor.reshape(1) if tensor.dim() == 0 else tensor)
        tensors = {other: each for other, each in whole.items() if other != key}
        save_file(tensors | ({} if broken is None else {key: broken}), tmp_path / "model.safetensors")
        with pytest.raises(LoaderError, match=f"tensor {key}"):
            load(tmp_path, config_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_other_sizes_than_the_files_are_errors(name: str, tmp_path: Path) -> None:
    shutil.copy(HERE / f"{name}.safetensors", tmp_path / "model.safetensors")
    for shape in ((32, 32), (64, 64), (32, 1), (1, 64), (32, 63), (33, 64), (1 << 40, 1 << 40)):
        with pytest.raises(LoaderError, match="tensor linear"):
            load(tmp_path, config_of(name), shape)


@pytest.mark.parametrize("groups", [[0] * 64, [0] * 31 + [1] * 33, [2] * 64, [-1] * 63 + [0], list(range(64))])
def test_groups_of_columns_of_other_sizes_are_errors(groups: list[int], tmp_path: Path) -> None:
    tensors = load_file(HERE / "gptq_4_desc_act.safetensors") | {"linear.g_idx": torch.tensor(groups).int()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoaderError, match=r"tensor linear[.]g_idx does not give 32 columns to each group"):
        load(tmp_path, config_of("gptq_4_desc_act"))


@pytest.mark.parametrize("group", [8, 24, 48, 96, 128, 1 << 20])
def test_groups_that_no_kernel_has_are_errors(group: int, tmp_path: Path) -> None:
    for name in ("w4a16", "gptq_4", "awq"):
        shutil.copy(HERE / f"{name}.safetensors", tmp_path / "model.safetensors")
        text = json.dumps(config_of(name)).replace('"group_size": 32', f'"group_size": {group}')
        with pytest.raises(LoaderError, match=f"tensor linear[.].*groups of {group} columns of 64 are not supported"):
            load(tmp_path, json.loads(text))


@pytest.mark.parametrize("name", ["gptq_4", "awq"])
def test_only_a_bias_of_zeros_may_be_left_over(name: str, tmp_path: Path) -> None:
    tensors = load_file(HERE / f"{name}.safetensors")
    for value in (0.0, 0.5):
        save_file(tensors | {"linear.bias": torch.full((32,), value).half()}, tmp_path / "model.safetensors")
        weights = SafetensorsWeights(tmp_path, torch.float32, CPU, read(config_of(name)))
        rows = weights.open_linear("linear", SHAPE)
        assert isinstance(rows, QuantRows)
        assert len(list(rows.blocks(1 << 20, 1))) == 1
        if value:
            with pytest.raises(LoaderError, match=r"tensors that the model does not use: linear[.]bias"):
                weights.check_all_used(lambda name: name == "expected")
        else:
            weights.check_all_used(lambda name: name == "expected")


def test_activation_scales_and_zero_points_of_symmetric_linears_may_be_left_over(tmp_path: Path) -> None:
    one = {f"linear.{name}": torch.ones(1) for name in ("input_scale", "weight_zero_point")}
    for name in ("w8a8", "fp8_tensor"):
        save_file(load_file(HERE / f"{name}.safetensors") | one, tmp_path / "model.safetensors")
        weights = SafetensorsWeights(tmp_path, torch.float32, CPU, read(config_of(name)))
        rows = weights.open_linear("linear", SHAPE)
        assert isinstance(rows, QuantRows)
        assert len(list(rows.blocks(1 << 20, 1))) == 1
        weights.check_all_used(lambda name: name == "expected")


def test_the_least_memory_is_the_bytes_of_the_files(tmp_path: Path) -> None:
    tensors = {name: each for name, each in load_file(HERE / "gptq_4.safetensors").items() if name != "expected"}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = SafetensorsWeights(tmp_path, torch.float32, CPU, read(config_of("gptq_4")))
    assert weights.least_bytes(32 * 64) == sum(tensor.nbytes for tensor in tensors.values())
    assert SafetensorsWeights(tmp_path, torch.float32, CPU).least_bytes(32 * 64) == 4 * 32 * 64


@pytest.mark.parametrize("config", [LAYOUTS["fp8"][0], config_of("fp8_channel")], ids=["fp8", "compressed-tensors"])
def test_the_log_says_that_activations_are_not_in_fp8(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        read(config)
    assert "activations in fp8; they stay in the model's dtype" in caplog.text


def test_random_weights_need_no_quantization(tmp_path: Path) -> None:
    """--load-format dummy reads config.json alone: its weights are dense."""
    folder = make_llama(tmp_path)
    edit_config(folder, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(LoaderError, match="quant_method is 'bitsandbytes': not supported"):
        Model(folder)
    assert Model(folder, load_format="dummy").loaded.geometry.num_layers == 2


def test_a_stored_shape_that_differs_is_an_error(tmp_path: Path) -> None:
    tensors = load_file(HERE / "w4a16.safetensors") | {"linear.weight_shape": torch.tensor([32, 72])}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoaderError, match=r"tensor linear[.]weight_shape is \[32, 72\], config[.]json says \[32, 64\]"):
        load(tmp_path, config_of("w4a16"))


def test_other_zero_points_than_the_middle_of_a_symmetric_linear_count(tmp_path: Path) -> None:
    """Files exist whose config says sym and whose zero points are not the middle."""
    shutil.copy(HERE / "gptq_8.safetensors", tmp_path / "model.safetensors")
    expected = load_file(HERE / "gptq_8.safetensors")["expected"]
    assert torch.equal(load(tmp_path, config_of("gptq_8") | {"sym": True}), expected)
