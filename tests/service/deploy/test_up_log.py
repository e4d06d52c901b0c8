"""What the services log for the people who run them, with both services for real."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

from cadenza import Client, SamplingParams
from cadenza.errors import InvalidRequestError, LocalServiceError
from cadenza_launcher.local import LocalServices
from tests.checkpoints import make_llama
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.slow


def test_the_log_of_a_small_cache_and_its_requests():
    lines: list[tuple[str, str]] = []
    with (
        LocalServices(
            ROOT / "models" / "cadenza-demo",
            num_gpu_blocks=2,
            log_requests=True,
            on_log=lambda *line: lines.append(line),
        ) as services,
        Client(services.target) as client,
    ):
        params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
        (output,) = client.generate([[5, 6, 7]], params)
        with pytest.raises(InvalidRequestError):
            client.generate(["a very secret text"], SamplingParams(logprobs=10**6))
    scheduler = [line for service, line in lines if service == "scheduler"]
    (warning,) = (line for line in scheduler if " WARNING " in line)
    longest = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
    assert f"fits into 2 KV blocks has {longest} tokens, prompt (at most 31) and output together, though" in warning
    (ended,) = (line for line in scheduler if "kv_capacity, prompt 3 tokens, output" in line)
    assert output.request_id in ended
    assert len([line for line in scheduler if "refused with INVALID_ARGUMENT, sampling_params.logprobs" in line]) == 1
    assert not [line for _, line in lines if "secret" in line]
    assert not [line for _, line in lines if "waiting" in line]


def test_a_model_without_a_tokenizer_is_named_at_the_start(tmp_path):
    model, lines = make_llama(tmp_path, tokenizer=False), []
    with LocalServices(model, on_log=lambda service, line: lines.append(line)):
        pass
    (warning,) = (line for line in lines if " WARNING " in line)
    assert "the model has no tokenizer: requests must send token ids, as `cadenza generate --ids 5,6,7` does" in warning


def test_an_error_of_a_service_is_read_once(tmp_path):
    """In the error that is raised, not in the log as well."""
    model, lines = make_llama(tmp_path), []
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(LocalServiceError, match=r"^the executor did not start: exit code 1: .*model\.norm\.weight"):
        LocalServices(model, on_log=lambda service, line: lines.append(line))
    assert not [line for line in lines if "model.norm.weight" in line]
