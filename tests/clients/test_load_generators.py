"""guidellm, aiperf and `vllm bench serve`, unmodified: each ends well, and counts what it asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.clients.asking import MAX_TOKENS, MODEL, PROGRAMS, PROMPTS, python_of, run

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]
NUM = len(PROMPTS)
VLLM = Path(os.environ.get("VLLM_PYTHON", "/tmp/vllm/bin/python"))


def write_lines(path: Path, **columns: object) -> Path:
    """The prompts as JSON lines: the first name has the prompt, the others what they say."""
    (name, _), *others = columns.items()
    path.write_text("".join(json.dumps({name: each, **dict(others)}) + "\n" for each in PROMPTS))
    return path


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_guidellm(server, answers, tmp_path, path):
    python = python_of("guidellm")
    data = write_lines(tmp_path / "data.jsonl", prompt="", output_tokens_count=MAX_TOKENS)
    backend = {
        "kind": "openai_http", "target": server.url, "model": server.name, "request_format": path,
        "extras": {"body": {"temperature": 0}},
    }  # fmt: skip
    report = tmp_path / "report.json"
    run(
        *(python, "-m", "guidellm", "run", "--disable-console", "--backend", json.dumps(backend)),
        *("--profile", "kind=constant,rate=4", "--constraint", f"kind=max_requests,count={NUM}"),
        *("--tokenizer", f"kind=huggingface_auto,model={MODEL}"),
        *("--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={report}"),
        cwd=tmp_path,
        GUIDELLM__MAX_WORKER_PROCESSES="1",
    )
    (found,) = json.loads(report.read_text())["benchmarks"]
    requests = found["requests"]
    assert (len(requests["successful"]), requests["errored"]) == (NUM, [])
    assert [each["output_tokens"] for each in requests["successful"]] == [MAX_TOKENS] * NUM
    if path == "/v1/completions":  # it ignores ends of sequences, which gRPC was not asked to
        texts = sorted(each["output"] for each in requests["successful"])
        assert all(any(text.startswith(known) for known in answers.texts.values()) for text in texts)


@pytest.mark.parametrize("kind", ["chat", "completions", "messages", "responses"])
def test_aiperf(server, tmp_path, kind):
    python = python_of("aiperf")
    run(
        *(python.with_name("aiperf"), "profile", "--model", server.name, "--url", server.url),
        *("--endpoint-type", kind, "--streaming", "--tokenizer", str(MODEL), "--ui", "none"),
        *("--request-count", str(NUM), "--concurrency", "2", "--synthetic-input-tokens-mean", "12"),
        *("--output-tokens-mean", str(MAX_TOKENS), "--artifact-dir", tmp_path / "out"),
        cwd=tmp_path,
        HF_HUB_OFFLINE="",  # with it, folders are taken for names of the hub
    )
    (report,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == NUM
    assert not found.get("error_request_count")
    assert found["output_sequence_length"]["avg"] > 0
    assert found["time_to_first_token"]["avg"] > 0


@pytest.mark.parametrize(
    ("backend", "path"),
    [
        ("vllm", "/v1/completions"),
        ("openai", "/v1/completions"),
        ("openai-chat", "/v1/chat/completions"),
        ("openai-responses", "/v1/responses"),
    ],
)
def test_vllm_bench_serve(server, tmp_path, backend, path):
    if not VLLM.exists():
        pytest.skip(f"there is no vLLM at {VLLM}: VLLM_PYTHON names an interpreter that has it (benchmarks/README.md)")
    run(
        *(VLLM, PROGRAMS / "vllm_bench_serve.py", "--backend", backend),
        *("--base-url", server.url, "--endpoint", path, "--model", server.name, "--tokenizer", str(MODEL)),
        *("--dataset-name", "random", "--random-input-len", "12", "--random-output-len", str(MAX_TOKENS)),
        *("--num-prompts", str(NUM), "--num-warmups", "0", "--temperature", "0", "--ignore-eos", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", tmp_path, "--result-filename", "out.json"),
        cwd=tmp_path,
    )
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (NUM, 0, NUM * MAX_TOKENS)
    assert all(ttft > 0 for ttft in found["ttfts"])
    assert all(found["generated_texts"])
