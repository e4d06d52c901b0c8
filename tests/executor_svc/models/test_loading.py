"""Loading models: what comes out of a good folder, and what is said about a bad one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.config import ExecutorConfig
from executor_svc.cpu import device as cpu_device
from executor_svc.device.interface import DeviceError, NumericsError
from executor_svc.models.loading import LoadedModel, LoaderError, load_model
from executor_svc.models.registry import ARCHITECTURES
from executor_svc.startup.executors import make_device
from executor_svc.startup.fingerprint import fingerprint
from tests.checkpoints import FAMILIES, edit_config, make_checkpoint, make_llama
from tests.executor_svc.driver import Model
from tests.helpers.marks import short_and_long

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"), vocab_size=270, tokenizer=True)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def load(folder: Path | str, **options: Any) -> LoadedModel:
    config = ExecutorConfig(model=str(folder), num_threads=1, max_num_batched_tokens=64, **options)
    return load_model(config, make_device(config))


def test_geometry(folder: Path) -> None:
    loaded = load(folder)
    g = loaded.geometry
    assert (g.name, g.architecture, g.model_type, g.dtype) == (str(folder), "LlamaForCausalLM", "llama", "float32")
    assert (g.vocab_size, g.hidden_size, g.num_layers, g.num_heads, g.num_kv_heads) == (270, 40, 2, 4, 2)
    assert (g.head_size, g.max_model_len) == (10, 512)
    per_layer = 40 * 40 * 2 + 2 * 20 * 40 + 3 * 72 * 40 + 2 * 40
    assert g.num_parameters == 2 * 270 * 40 + 40 + 2 * per_layer
    assert g.weight_bytes == 4 * g.num_parameters
    assert loaded.tokenizer == str(folder.resolve())
    assert loaded.bos_token_id == 0


def test_tied_weights_count_once(tmp_path: Path) -> None:
    tied = load(make_llama(tmp_path / "tied", tie_word_embeddings=True)).geometry
    untied = load(make_llama(tmp_path / "untied")).geometry
    assert untied.num_parameters - tied.num_parameters == 131 * 40


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(1, None, (1,)), ([5, 1], 7, (1, 5, 7)), (None, [3, 2], (2, 3)), (None, None, ()), (1, 1, (1,)), (1, 9999, (1,))],
)
def test_eos_ids_of_both_files(folder: Path, config: Any, generation: Any, expected: tuple[int, ...]) -> None:
    edit_config(folder, eos_token_id=config)
    (folder / "tokenizer_config.json").unlink()  # its own EOS: test_end_ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load(folder, load_format="dummy").eos_token_ids == expected


def test_no_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert load(folder).tokenizer == ""


def test_max_model_len(folder: Path) -> None:
    assert load(folder, max_model_len=100).geometry.max_model_len == 100
    with pytest.raises(LoaderError, match=r"--max-model-len 513: .* at most 512"):
        load(folder, max_model_len=513)


@pytest.mark.parametrize(
    ("saved", "option", "expected"),
    [
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "float32"),
        ("float16", "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "bfloat16"),
    ],
)
def test_dtypes(tmp_path: Path, saved: str, option: str, expected: str) -> None:
    loaded = load(make_llama(tmp_path, dtype=getattr(torch, saved)), dtype=option)
    assert loaded.geometry.dtype == expected


@pytest.mark.parametrize("saved", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("option", ["float32", "bfloat16"])
def test_weights_are_converted(tmp_path: Path, saved: str, option: str) -> None:
    """Loaded weights are those of a checkpoint that was converted before."""
    folder = make_llama(tmp_path / "saved", dtype=getattr(torch, saved))
    converted = Path(shutil.copytree(folder, tmp_path / "converted"))
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, saved)}
    save_file(
        {name: tensor.to(getattr(torch, option)) for name, tensor in tensors.items()}, converted / "model.safetensors"
    )
    assert load(folder, dtype=option).weights_digest == load(converted, dtype=option).weights_digest


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
def test_sharded_is_the_same_model(tmp_path: Path, family: str) -> None:
    single, sharded = make_checkpoint(tmp_path / "a", family), make_checkpoint(tmp_path / "b", family, shards=True)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert load(single).weights_digest == load(sharded).weights_digest


def test_weights_digest_sees_every_weight(original: Path, tmp_path: Path) -> None:
    first = load(original).weights_digest
    assert len(first) == 32
    assert load(original).weights_digest == first
    assert load(original, dtype="bfloat16").weights_digest != first
    assert load(make_llama(tmp_path, vocab_size=270, seed=1)).weights_digest != first


def test_dummy_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first = load(folder, load_format="dummy").weights_digest
    assert load(folder, load_format="dummy").weights_digest == first
    assert load(folder, load_format="dummy", seed=1).weights_digest != first


@pytest.mark.parametrize("family", short_and_long(FAMILIES, ["gemma3_text", "llama", "phi3"]))
def test_dummy_weights_of_every_family(tmp_path: Path, family: str) -> None:
    """config.json alone will do: the same sizes as with weights, seeded, finite logits."""
    folder = make_checkpoint(tmp_path, family)
    sizes = load(folder).geometry
    (folder / "model.safetensors").unlink()
    first, other = (Model(folder, load_format="dummy", seed=seed) for seed in (0, 1))
    assert first.loaded.geometry == sizes
    assert first.loaded.weights_digest != other.loaded.weights_digest
    logits = first.whole(list(range(50)))
    assert bool(logits.isfinite().all())
    assert torch.equal(logits, Model(folder, load_format="dummy").whole(list(range(50))))
    assert not torch.equal(logits, other.whole(list(range(50))))


@pytest.mark.parametrize("family", short_and_long(FAMILIES, ["gemma3_text", "llama", "phi3"]))
def test_every_tensor_is_needed_and_none_is_left_over(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "layers.1" in name or "layers" not in name:
            save_file({other: value for other, value in tensors.items() if other != name}, path)
            with pytest.raises(LoaderError, match=f"tensor {name} is missing"):
                load(folder)
            save_file({**tensors, name: tensor[:-1].clone()}, path)
            with pytest.raises(
                LoaderError, match=rf"tensor {name} has shape \[{tensor.shape[0] - 1}.*config.json says"
            ):
                load(folder)
    save_file({**tensors, "model.layers.1.extra.weight": torch.ones(2)}, path)
    with pytest.raises(LoaderError, match=r"1 tensors that the model does not use: model\.layers\.1\.extra\.weight"):
        load(folder)


def test_fingerprint(original: Path) -> None:
    def take(**options: Any) -> Any:
        config = ExecutorConfig(model=str(original), num_gpu_blocks=4, **{"num_threads": 1, **options})
        device = make_device(config)
        loaded = load_model(config, device)
        return fingerprint(loaded, device, device.new_kv_cache(loaded.geometry, config))

    first = take()
    assert take() == first
    assert len(first.digest) == 32
    assert (first.mode, first.dtype, first.kv_dtype, first.num_threads) == ("exact", "float32", "float32", 1)
    changed = [take(dtype="bfloat16"), take(numerics="fast"), take(num_threads=2)]
    torch.set_num_threads(1)
    assert len({first.digest, *(other.digest for other in changed)}) == 4
    assert take(block_size=64).digest == first.digest, "results do not depend on the block size"


def test_fingerprint_sees_the_config(folder: Path, tmp_path: Path) -> None:
    """The same tensors give other logits with another theta, or with the other list of longrope."""
    first = load(folder)
    edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    other = load(folder)
    assert other.weights_digest == first.weights_digest
    assert other.spec_digest != first.spec_digest
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    scaling = {"rope_type": "longrope", **factors, "original_max_position_embeddings": 64}
    phi = make_checkpoint(tmp_path / "phi", "phi3", rope_parameters=scaling, original_max_position_embeddings=64)
    digests = [load(phi, max_model_len=length).spec_digest for length in (50, 64, 65, 512)]
    assert digests[0] == digests[1] != digests[2] == digests[3]


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _rename(name: str, other: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).rename(folder / other)


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def _index(text: str) -> Callable[[Path], None]:
    """An index in place of the file."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(text)

    return damage


def _config(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **fields)


BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (_remove("config.json"), "config.json is missing"),
    (_write("config.json", "{"), "config.json cannot be read"),
    (_write("config.json", "[]"), "no JSON object"),
    (_write("config.json", "{}"), f"architecture none .* supported: the {len(ARCHITECTURES)} of docs/models.md"),
    (_config(architectures="LlamaForCausalLM"), "config.json: architectures must be a list of texts, not 'LlamaForC"),
    (_config(architectures=[["LlamaForCausalLM"]]), "config.json: architectures must be a list of texts, not an array"),
    (_config(model_type=["llama"]), r"config.json: model_type must be a text, not \['llama'\]"),
    (_config(dtype=["bfloat16"]), r"config.json: dtype must be a text, not \['bfloat16'\]"),
    (_config(torch_dtype=16), "config.json: torch_dtype must be a text, not 16"),
    (_config(dtype="bfloat17"), "config.json: dtype is 'bfloat17', which is no dtype, such as bfloat16"),
    (_write("config.json", "[" * 100_000), "config.json cannot be read: it is nested too deeply"),
    (_write("config.json", "1" * 5000), r"config.json cannot be read: Exceeds the limit \(4300 digits\)"),
    (
        _config(vocab_size=10**400),
        "config.json: vocab_size must be at most 9223372036854775807, not a number of 1329 b",
    ),
    (_config(rms_norm_eps=10**400), "config.json: rms_norm_eps must be a number above 0, not a number of 1329 bits"),
    (_config(hidden_act="x" * 10**6), r"config.json: hidden_act 'x{99}\.\.\. is not supported; supported: silu, swish"),
    (_config(architectures=["x" * 10**6]), r"architecture x{200} in config.json, .* supported: the"),
    (
        _config(eos_token_id="x" * 10**6),
        r"config.json: eos_token_id must be a token id or a list of them, not 'x{99}\.\.",
    ),
    (_write("generation_config.json", '{"eos_token_id": {"a": 1}}'), r"eos_token_id must be .*, not \{'a': 1\}"),
    (_write("generation_config.json", '{"bos_token_id": 1.0}'), "generation_config.json: bos_token_id must be .* 1.0"),
    (_write("generation_config.json", "[" * 100_000), "generation_config.json cannot be read: it is nested too deeply"),
    (_write("generation_config.json", "[]"), "generation_config.json holds no JSON object"),
    (_config(quantization_config="gptq"), "config.json: quantization_config must be an object, not 'gptq'"),
    (_config(quantization_config=[]), r"config.json: quantization_config must be an object, not \[\]"),
    (_write("hf_quant_config.json", '{"quantization": []}'), "hf_quant_config.json: quantization must be an object"),
    (
        _config(architectures=["GPTJForCausalLM"]),
        f"GPTJForCausalLM .* supported: the {len(ARCHITECTURES)} of docs/models.md",
    ),
    (_config(hidden_size=None), "config.json: hidden_size must be"),
    (_config(rope_parameters={"rope_type": "mrope"}), "config.json: rope_parameters.rope_type 'mrope'"),
    (_config(intermediate_size=80), r"gate_proj.weight has shape \[72, 40\], config.json says \[80, 40\]"),
    (_config(num_hidden_layers=3), "model.layers.2.* is missing"),
    (_config(num_hidden_layers=1), "9 tensors that the model does not use"),
    (_config(attention_bias=True), "q_proj.bias is missing"),
    (_remove("model.safetensors"), r"no weights: neither model.safetensors nor .* is there \(--load-format dummy"),
    (_rename("model.safetensors", "pytorch_model.bin"), r"no weights: .* is there, and pytorch_model.bin is not read"),
    (_config(vocab_size=10**12), r"take \d{15} bytes in float32, \d+ bytes of memory are free"),
    (_config(max_position_embeddings=10**12), r"--max-model-len 1000000000000 take \d{14} bytes in float32"),
    (_config(num_hidden_layers=10**9), "num_hidden_layers must be at most 10000, not 1000000000"),
    (_config(eos_token_id="</s>"), "config.json: eos_token_id must be a token id or a list of them, not '</s>'"),
    (_write("generation_config.json", '{"eos_token_id": [1, true]}'), r"generation_config.json: eos_token_id must be"),
    (_write("model.safetensors", "rubbish"), "not a readable safetensors file"),
    (_index("{}"), "no weight_map"),
    (_index('{"weight_map": {"a": "b.safetensors"}}'), "missing: b.safetensors"),
    (_index('{"weight_map": {"a": "b.bin"}}'), "names b.bin, which is no safetensors"),
    (_index('{"weight_map": {"a": "../b.safetensors"}}'), r"names \.\./b.safetensors"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN, ids=[message[:40] for _, message in BROKEN])
def test_broken_folders(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(LoaderError, match=message) as raised:
        load(folder)
    assert str(folder) in str(raised.value)
    assert len(str(raised.value)) < 500 + len(", ".join(ARCHITECTURES))
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("name", "value"),
    [("model.layers.1.mlp.up_proj.weight", "nan"), ("lm_head.weight", "inf"), ("model.norm.weight", "-inf")],
)
@pytest.mark.parametrize("options", [{}, {"numerics": "fast"}, {"dtype": "bfloat16"}])
def test_numbers_that_are_not_finite_are_the_checkpoints(
    folder: Path, name: str, value: str, options: dict[str, Any]
) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[-1] = float(value)
    save_file(tensors, path)
    with pytest.raises(
        LoaderError, match=f"model folder .*: 1 tensors hold NaN or infinite numbers: {name}: the check"
    ):
        load(folder, **options)


def test_an_unused_row_of_the_embeddings_may_be_nan(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][-1, 0] = float("nan")
    save_file(tensors, path)
    load(folder)
    assert "model.embed_tokens.weight holds NaN or infinite numbers: texts with such tokens fail" in caplog.text


@pytest.mark.parametrize("model", ["/no/such/folder", "./nowhere", "models/of/mine", "~/nowhere-at-all"])
def test_paths_that_do_not_exist_are_no_hub_ids(model: str) -> None:
    with pytest.raises(LoaderError, match=f"--model {model}: no such folder$"):
        load(model)


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(LoaderError, match="neither a folder nor a GGUF file"):
        load(folder / "config.json")


def test_hub_id_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        LoaderError, match=r"--model some/model: no such folder, .* not in the local cache, and HF_HUB_OFF"
    ):
        load("some/model")


def test_hub_id_that_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda model, **_: str(folder))
    loaded = load("some/model")
    assert (loaded.geometry.name, loaded.tokenizer) == ("some/model", "some/model")


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(DeviceError, match="--device cuda: PyTorch sees no GPU here"):
        make_device(ExecutorConfig(model="m", device="cuda"))
    for name, value in (("quantization", "fp8"), ("kv_cache_dtype", "fp8")):
        with pytest.raises(DeviceError, match=f"--{name.replace('_', '-')} {value} is not possible on the CPU"):
            make_device(ExecutorConfig(model="m", device="cpu", **{name: value}))
    with pytest.raises(DeviceError, match="--dtype float16"):
        make_device(ExecutorConfig(model="m", dtype="float16"))
    assert make_device(ExecutorConfig(model="m", num_threads=1)).name == "cpu"


def test_exact_numerics_are_refused_where_they_do_not_hold(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cpu_device, "probe_linear", lambda linear, *_: "a row differs" if linear.in_features == 72 else None
    )
    with pytest.raises(NumericsError, match=r"mlp.down \(in 72, out 40, .* --numerics fast"):
        load(folder)
    load(folder, numerics="fast")
