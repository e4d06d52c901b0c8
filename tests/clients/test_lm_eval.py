"""lm-eval, unmodified, with two tasks of our own: likelihoods by completions with echo, and texts by chats."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from cadenza import Client, SamplingParams
from tests.clients.asking import MODEL, python_of, run

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]
ROWS = [
    {"question": "12+34=", "choices": ["46", "47", "90"], "answer": 0},
    {"question": "5+5=", "choices": ["10", "11", "3"], "answer": 0},
    {"question": "20-8=", "choices": ["13", "12", "2"], "answer": 1},
]
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
"""
LIKELIHOODS = """output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
"""
TEXTS = """output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0.0}
metric_list: [{metric: exact_match}]
"""


def evaluate(server, folder: Path, *, name: str, task: str, kind: str, path: str) -> list[dict]:
    """Run a task; returns what it logged of each row, in their order."""
    python = python_of("lm-eval")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + task)
    model = f"model={server.name},base_url={server.url}{path},num_concurrent=2,max_retries=1"
    model += f",tokenized_requests={'chat' not in kind}"
    run(
        *(python.with_name("lm_eval"), "run", "--model", kind, "--model_args"),
        f"{model},tokenizer_backend=huggingface,tokenizer={MODEL}",
        *("--tasks", name, "--include_path", folder, "--log_samples", "--output_path", folder / "out"),
        *(("--apply_chat_template",) if "chat" in kind else ()),
        cwd=folder,
        HF_HOME=str(folder / "home"),
        OPENAI_API_KEY="any",
    )
    (samples,) = (folder / "out").rglob("samples_*.jsonl")
    return sorted(map(json.loads, samples.read_text().splitlines()), key=lambda each: each["doc_id"])


def ids_of(server, text: str) -> list[int]:
    """Token ids as lm-eval sends them: without special ones."""
    body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}/tokenize", body), timeout=30) as response:
        return json.load(response)["tokens"]


def test_likelihoods_are_those_of_grpc(server, tmp_path):
    found = evaluate(
        server, tmp_path, name="likelihoods", task=LIKELIHOODS, kind="local-completions", path="/v1/completions"
    )
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with Client(server.target) as client:
        for row, sample in zip(ROWS, found, strict=True):
            prompts = [{"prompt_token_ids": ids_of(server, row["question"] + choice)} for choice in row["choices"]]
            outputs = client.generate(prompts, params)
            skipped = len(ids_of(server, row["question"]))
            for output, (likelihood, _) in zip(outputs, sample["filtered_resps"], strict=True):
                rows = zip(output.prompt_token_ids[skipped:], output.prompt_logprobs[skipped:], strict=True)
                wanted = sum(each[token].logprob for token, each in rows)
                assert float(likelihood) == pytest.approx(wanted, abs=1e-3)


def test_texts_are_those_of_grpc(server, tmp_path):
    found = evaluate(
        server, tmp_path, name="texts", task=TEXTS, kind="local-chat-completions", path="/v1/chat/completions"
    )
    params = SamplingParams(temperature=0, max_tokens=8, stop=["\n"])
    with Client(server.target) as client:
        for row, sample in zip(ROWS, found, strict=True):
            (output,) = client.chat([{"role": "user", "content": row["question"]}], params)
            assert sample["resps"][0][0] == output.outputs[0].text
