"""Runs guidellm, another load generator, with its own interpreter: sends the load and reads its report.

https://github.com/vllm-project/guidellm
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.rows import BenchmarkError
from benchmarks.peers.harness import Load, Seen, run_command

NAME = "guidellm"


def run_guidellm(python: Path, load: Load, folder: Path) -> Seen:
    """Send the load and read the timestamps of each request; raises BenchmarkError if one failed."""
    data, result = folder / "guidellm.jsonl", folder / "guidellm.json"
    data.write_text(load.lines(prompt="prompt", output_len="output_tokens_count"), encoding="utf-8")
    backend = {
        "kind": "openai_http",
        "target": load.url.removesuffix("/v1"),
        "model": load.model,
        "request_format": "/v1/completions",
        "extras": {"body": {"temperature": 0}},
    }
    command = [
        *(str(python), "-m", "guidellm", "run", "--disable-console"),
        *("--backend", json.dumps(backend)),
        *("--profile", f"kind=constant,rate={load.rate:g}"),
        *("--constraint", f"kind=max_requests,count={len(load.prompts)}"),
        *("--tokenizer", f"kind=huggingface_auto,model={load.tokenizer}"),
        *("--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={result}"),
    ]
    run_command(command, {**os.environ, "HF_HUB_OFFLINE": "1"})
    return _seen(json.loads(result.read_text(encoding="utf-8")), len(load.prompts))


def _seen(report: Mapping[str, Any], count: int) -> Seen:
    (run,) = report["benchmarks"]
    metrics, requests = run["metrics"], run["requests"]["successful"]
    if len(requests) != count:
        raise BenchmarkError(f"{NAME}: {len(requests)} of {count} requests completed")
    stamps = [each["info"]["timings"] for each in requests]

    def column(name: str) -> Any:
        return np.array([each[name] for each in stamps], float)

    ttft, tpot = metrics["time_to_first_token_ms"]["successful"], metrics["inter_token_latency_ms"]["successful"]
    return Seen(
        due_s=column("targeted_start"),
        sent_s=column("request_start"),
        first_s=column("first_token_iteration"),
        last_s=column("last_token_iteration"),
        num_prompt_tokens=sum(each["prompt_tokens"] for each in requests),
        num_output_tokens=sum(each["output_tokens"] for each in requests),
        reported={
            "ttft_p50_ms": ttft["median"],
            "ttft_p99_ms": ttft["percentiles"]["p99"],
            "tpot_p50_ms": tpot["median"],
            "output_tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
        },
        version=str(report["metadata"]["guidellm_version"]),
    )
