"""OpenVINO GenAI's continuous batching on the CPU, token ids in and out.

As it comes, its cache is in 8 bits and activations are quantized in groups where the processor gains by it. Arguments:
the model's folder, tokens of the longest request, most requests at once, a folder for the export, threads, a
tokenizer.json, weights (bf16, int8 or int4); in the environment perhaps ONEDNN_MAX_CPU_ISA, the highest instruction
set. A question is `{"requests": [{"prompt", "output_len"}], "arrivals": null or seconds}`, its answer `{"wall_s",
"times": [[first, last, tokens, due]]}` in seconds since the start.

The checkpoint is exported to OpenVINO's model once, in its own precision or in few bits, with a tokenizer, which the
pipeline wants though token ids go past it. Needs openvino, openvino-genai, openvino-tokenizers, nncf, optimum-intel and
transformers below 5.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.answering import answering

MAX_NUM_BATCHED_TOKENS = 512
CACHE_GB = 2


@dataclass(slots=True)
class Request:
    """A request in the pipeline."""

    handle: Any
    output_len: int
    due_s: float
    num_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0


class Engine:
    """A continuous batching pipeline."""

    def __init__(self, genai: Any, openvino: Any, pipeline: Any) -> None:
        self._genai, self._openvino, self._pipeline = genai, openvino, pipeline
        self._numpy = importlib.import_module("numpy")
        self._num_requests = 0

    def serve(self, requests: list[dict[str, Any]], arrivals: list[float] | None) -> dict[str, Any]:
        """Serve all requests; raises RuntimeError for an output of the wrong length."""
        due = arrivals or [0.0] * len(requests)
        sent: list[Request] = []
        start = time.perf_counter()
        while len(sent) < len(requests) or self._pipeline.has_non_finished_requests():
            while len(sent) < len(requests) and due[len(sent)] <= time.perf_counter() - start:
                sent.append(self._send(requests[len(sent)], due[len(sent)]))
            if not self._pipeline.has_non_finished_requests():
                time.sleep(max(0.0, due[len(sent)] - (time.perf_counter() - start)))
                continue
            self._pipeline.step()
            self._receive(sent, time.perf_counter() - start)
        wall_s = time.perf_counter() - start
        made = [each.num_tokens for each in sent]
        if made != [each.output_len for each in sent]:
            raise RuntimeError(f"outputs of {made} tokens")
        return {"wall_s": wall_s, "times": [[each.first_s, each.last_s, each.num_tokens, each.due_s] for each in sent]}

    def _send(self, request: dict[str, Any], due_s: float) -> Request:
        wanted = self._genai.GenerationConfig()
        wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = request["output_len"], True, False
        prompt = self._openvino.Tensor(self._numpy.array([request["prompt"]], dtype=self._numpy.int64))
        self._num_requests += 1
        handle = self._pipeline.add_request(self._num_requests, prompt, wanted)
        return Request(handle, request["output_len"], due_s)

    def _receive(self, sent: list[Request], now: float) -> None:
        for each in sent:
            if each.num_tokens == each.output_len or not each.handle.can_read():
                continue
            each.num_tokens += sum(len(output.generated_ids) for output in each.handle.read().values())
            each.first_s, each.last_s = each.first_s or now, now


def main() -> None:
    """Export, load, report the version, then answer until stdin ends."""
    folder, most, cache = Path(sys.argv[1]), int(sys.argv[3]), Path(sys.argv[4])
    threads, tokenizer, weights = sys.argv[5], Path(sys.argv[6]), sys.argv[7]
    with answering() as answer:
        genai, openvino = (importlib.import_module(name) for name in ("openvino_genai", "openvino"))
        exported = openvino_of(folder, cache, tokenizer, weights)
        scheduling = genai.SchedulerConfig()
        scheduling.cache_size, scheduling.max_num_seqs = CACHE_GB, most
        scheduling.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
        scheduling.enable_prefix_caching = False
        highest = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
        properties = {"INFERENCE_NUM_THREADS": threads}
        if highest and not highest.endswith(
            ("BF16", "AMX")
        ):  # it queries the processor, which may have bf16, not oneDNN
            properties["INFERENCE_PRECISION_HINT"] = "f32"
        pipeline = genai.ContinuousBatchingPipeline(
            str(exported), genai.Tokenizer(str(exported)), scheduling, "CPU", **properties
        )
        answer(
            {
                "version": openvino.__version__,
                "weights": weights_text(weights, json.loads((folder / "config.json").read_text(encoding="utf-8"))),
                "threads": int(threads),
                "max_num_seqs": most,
                "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
                "cache_gb": CACHE_GB,
                "highest_isa": highest or "the processor's",
            }
        )
        engine = Engine(genai, openvino, pipeline)
        for line in sys.stdin:
            question = json.loads(line)
            answer(engine.serve(question["requests"], question["arrivals"]))


_GROUPS = (128, 32)
"""Of int4: nncf's default, and what divides the columns of small models."""


def openvino_of(folder: Path, cache: Path, tokenizer: Path, weights: str = "bf16") -> Path:
    """The checkpoint's export, made once in `cache` per version of the checkpoint; tokenizer: any tokenizer.json.

    weights: bf16, or nncf's int8 or int4.
    """
    stamp = int((folder / "config.json").stat().st_mtime)
    name = f"{folder.name}-{stamp}-openvino"
    group = int4_group(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    path = cache / (name + {"bf16": "", "int8": "-int8", "int4": f"-int4-{group}"}[weights])
    if path.is_dir():
        return path
    made = Path(tempfile.mkdtemp(prefix=path.name, suffix=".part", dir=cache))
    try:
        with tempfile.TemporaryDirectory(dir=cache) as source:
            _old_layout(folder, Path(source))
            _export(Path(source), made, weights, group)
        _write_tokenizer(tokenizer, made)
        made.rename(path)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return path


def old_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json of transformers 5 as transformers 4 reads it: dtype and angle under names of their own.

    Raises ValueError for angles other than the default ones.
    """
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope of type {rope['rope_type']}: this converts the default one only")
    added = {"torch_dtype": config.get("dtype") or config.get("torch_dtype")}
    if "rope_theta" in rope:
        added["rope_theta"] = rope["rope_theta"]
    return {**config, **added}


def int4_group(config: dict[str, Any]) -> int:
    """Columns that share a scale in int4: the largest of _GROUPS that divides the columns of all linears."""
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    columns = (config["hidden_size"], config["intermediate_size"], heads * head_size)
    return next(group for group in _GROUPS if not any(count % group for count in columns))


def weights_text(weights: str, config: dict[str, Any]) -> str:
    """What an export's weights are, for rows."""
    return {
        "bf16": "bf16",
        "int8": "int8 by rows",
        "int4": f"int4 by groups of {int4_group(config)}, symmetric; embeddings and head int8",
    }[weights]


def _old_layout(folder: Path, source: Path) -> None:
    """The checkpoint's files, with config.json in the older form."""
    for file in folder.iterdir():
        if file.name != "config.json":
            os.symlink(file.resolve(), source / file.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (source / "config.json").write_text(json.dumps(old_config(config)), encoding="utf-8")


def _export(source: Path, made: Path, weights: str, group: int) -> None:
    package = importlib.import_module("optimum.intel")
    options: dict[str, Any]
    if weights == "bf16":  # without this option a model of a billion parameters or more comes out in int8
        options = {"load_in_8bit": False}
    elif weights == "int8":
        options = {"quantization_config": package.OVWeightQuantizationConfig(bits=8)}
    else:
        config = package.OVWeightQuantizationConfig(bits=4, sym=True, group_size=group, ratio=1.0)
        options = {"quantization_config": config}
    model = package.OVModelForCausalLM
    model.from_pretrained(str(source), export=True, compile=False, **options).save_pretrained(made)


def _write_tokenizer(tokenizer: Path, made: Path) -> None:
    fast = importlib.import_module("transformers").PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    fast.eos_token = fast.pad_token = fast.convert_ids_to_tokens(0)
    models = importlib.import_module("openvino_tokenizers").convert_tokenizer(fast, with_detokenizer=True)
    for model, name in zip(models, ("tokenizer", "detokenizer"), strict=True):
        importlib.import_module("openvino").save_model(model, str(made / f"openvino_{name}.xml"))


if __name__ == "__main__":
    main()
