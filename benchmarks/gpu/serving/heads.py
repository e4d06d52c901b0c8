"""Stages of an EAGLE-3 head: what its drafts cost where none is right, and give where all are.

The head has the shape's own width and random weights. Left alone its drafts are wrong, and a step shows what drafting
and checking cost; from that the gain at a usual acceptance is computed. A bias that has each output repeat one token
holds for drafts too, and nearly all are right; such parameters have their drafts launched one by one, by no graph.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.common.benchmark import SEED
from benchmarks.common.burst_client import generate_burst
from benchmarks.gpu.cases import Goal, Metrics
from benchmarks.gpu.serving.adapters import DRAFT_COUNTS, FORCED_TOKEN, served
from benchmarks.gpu.serving.run import Run
from benchmarks.gpu.serving.stages import equal_requests, services_of
from benchmarks.gpu.shapes import ModelShape

NUM_DRAFTS = 3
_MAX_NUM_SEQS = 64
_ACCEPTANCE = 0.7
"""Of each draft behind accepted ones, at which the gain is computed."""
_DRAFT_VOCAB = 32000
_PROMPT, _OUTPUT, _TRIAL_OUTPUT = 64, 256, 12
_STAGE_S = 4.0
_OWN_FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def write_head(shape: ModelShape, folder: Path) -> Path:
    """Make the folder of a head for this shape that holds only config.json, for `--load-format dummy`."""
    vocab_size = shape.vocab_size
    content = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": vocab_size,
        "draft_vocab_size": min(_DRAFT_VOCAB, vocab_size // 2),
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [0, shape.num_layers // 2, shape.num_layers],
        **{name: shape.config[name] for name in (*_OWN_FIELDS, "rms_norm_eps", "rope_theta")},
        **{name: shape.config[name] for name in ("max_position_embeddings", "dtype")},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    return folder


def serve_heads(run: Run, model: Path, trial: bool) -> None:
    """Run the stages of one shape: all counts without drafts, all with, and then what drafts cost and give.

    Raises BenchmarkError if a service died.
    """
    found: dict[tuple[bool, bool, int], Metrics] = {}
    output, limit_s = (_TRIAL_OUTPUT, 0.0) if trial else (_OUTPUT, _STAGE_S)
    with tempfile.TemporaryDirectory(prefix="cadenza-head-") as place:
        head = write_head(run.shape, Path(place))
        drafting = {"speculative": "eagle3", "speculative_model": str(head), "num_speculative_tokens": NUM_DRAFTS}
        for drafted in (False, True):
            run.changed = {"max_num_seqs": 16 if trial else _MAX_NUM_SEQS, **(drafting if drafted else {})}
            with services_of(run, model) as services:
                run.limited(generate_burst(services.target, run.load.warm_up))
                for count in DRAFT_COUNTS:
                    requests = equal_requests(count, _PROMPT, output, SEED, run.shape.vocab_size)
                    for forced in (False, True):
                        token = FORCED_TOKEN if forced else None
                        work = partial(run.limited_metrics, partial(served, services.target, requests, token))
                        name = f"{count} sequences, {_kind(drafted, forced)}"
                        found[drafted, forced, count] = run.stage(name, limit_s, work, requests)
    for count in DRAFT_COUNTS:
        for forced in (False, True):
            without, with_drafts = found[False, forced, count], found[True, forced, count]
            if without and with_drafts:
                metrics = _gain(without, with_drafts) if forced else _cost(without, with_drafts)
                goal = Goal("ratio" if forced else "gain_at_70", at_least=1.0)
                name = f"{count} sequences, {_kind(True, forced)} beside none"
                run.stage(name, 0.0, partial(dict, metrics), goal=goal)


def _kind(drafted: bool, forced: bool) -> str:
    if not drafted:
        return "off, one token repeated" if forced else "off"
    return "head, all right" if forced else "head, none right"


def _gain(without: Metrics, drafted: Metrics) -> Metrics:
    return {"ratio": drafted["tokens_per_s"] / without["tokens_per_s"]}


def _cost(without: Metrics, drafted: Metrics) -> Metrics:
    """How much longer a step takes, and the gain in tokens per second, computed from it."""
    ratio = drafted["step_ms"] / without["step_ms"]
    tokens = sum(_ACCEPTANCE**ahead for ahead in range(1 + NUM_DRAFTS))
    return {"step_cost_percent": 100 * (ratio - 1), "gain_at_70": tokens / ratio}
