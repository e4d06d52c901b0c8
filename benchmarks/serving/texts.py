"""Real texts of the demo model: tokens a step, acceptance by position and speed of each source, beside none.

Requests run one after the other, greedy, to their end. `first` prompts are answered before, untimed: their outputs are
in the shared automaton of suffix then, as those of earlier users are. Each repeat has a cache salt of its own, and so
knows nothing of the one before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import progress
from benchmarks.common.checkpoints import CACHE
from benchmarks.common.rows import ROOT, BenchmarkError, OtherLoad, Row, make_row
from benchmarks.common.workload import Request
from benchmarks.peers.process import PeerProcess, peer_process
from benchmarks.serving.decoding import Served, served
from benchmarks.serving.opening import names_type

_DEMO = ROOT / "models" / "cadenza-demo"
DRAFT_MODEL = ROOT / "models" / "cadenza-demo-draft"
_PROMPTS = Path(__file__).with_name("prompts.json")
_MOST_OUTPUT = 200
_NUM_DRAFTS = 5
_LLAMA_MODES = ("off", "ngram", "draft")
Texts = Mapping[str, Sequence[Request]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this measure."""
    parser.add_argument(
        "--draft-model", type=Path, default=DRAFT_MODEL, help="of the demo model (default: that in models/)"
    )
    parser.add_argument(
        "--kinds", type=names_type(tuple(json.loads(_PROMPTS.read_text()))), metavar="NAMES",
        help="of texts (default: all)",
    )  # fmt: skip
    parser.add_argument("--llama-python", type=Path, help="an interpreter that has llama-cpp-python: runs beside")


def measure(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """One row for each kind of text."""
    kinds = {kind: texts for kind, texts in _texts().items() if options.kinds is None or kind in options.kinds}
    longest = max(len(each.prompt) for texts in kinds.values() for _, each in texts) + _MOST_OUTPUT
    sources: dict[str, dict[str, Any]] = {
        "off": {},
        "ngram": {"speculative": "ngram"},
        "suffix": {"speculative": "suffix"},
        "draft": {"speculative": "draft", "speculative_model": str(options.draft_model)},
        "auto": {"speculative": "auto", "speculative_model": str(options.draft_model)},
    }
    with contextlib.ExitStack() as stack:
        systems = {
            source: stack.enter_context(
                served(_DEMO, max_model_len=1024, num_gpu_blocks=400, num_speculative_tokens=_NUM_DRAFTS, **settings)
                if settings
                else served(_DEMO, max_model_len=1024, num_gpu_blocks=400)
            )
            for source, settings in sources.items()
        }
        llama = None if options.llama_python is None else stack.enter_context(_llama(options, longest))
        for kind, texts in kinds.items():
            repeats, other_cores = [], []
            for index in range(options.repeats + 1):
                with OtherLoad() as other:
                    found = _measure(kind, f"{kind} {index}", systems, llama, texts)
                if index:  # the first run warms up
                    repeats.append(found)
                    other_cores.append(other.cores)
            params = {
                "measure": "texts", "kind": kind, "prompts": len(texts), "num_drafts": _NUM_DRAFTS,
                "draft_model": options.draft_model.name, "llama_cpp": None if llama is None else llama.version,
            }  # fmt: skip
            yield make_row(name, seed=options.seed, params=params, repeats=repeats, other_cores=other_cores)


def describe(row: Row) -> str:
    """A line for each source."""
    found = row.medians
    lines = [f"{row.params['kind']}: tokens a step, and speed as a multiple of off ({found['off_tokens_per_s']:.0f}/s)"]
    for source in ("ngram", "suffix", "draft", "auto", "llama_ngram", "llama_draft"):
        if f"{source}_gain" in found:
            steps, gain = found[f"{source}_tokens_per_step"], found[f"{source}_gain"]
            shares = [
                f"{found[f'{source}_acceptance_{k}']:.0%}"
                for k in range(_NUM_DRAFTS)
                if found.get(f"{source}_drafted_{k}")
            ]
            lines.append(f"  {source:12} {steps:.2f}  {gain:.2f}x  accepted by position {', '.join(shares) or '-'}")
    return "\n".join(lines)


def _texts() -> dict[str, list[tuple[Request | None, Request]]]:
    """By kind: requests, each with the one that is answered before it, or None."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_DEMO)

    def request(name: str, text: str) -> Request:
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return Request(name, list(ids), _MOST_OUTPUT)

    return {
        kind: [
            (
                request(f"{kind} {index}", each["first"]) if "first" in each else None,
                request(f"{kind} {index}", each["prompt"]),
            )
            for index, each in enumerate(texts)
        ]
        for kind, texts in json.loads(_PROMPTS.read_text()).items()
    }


def _measure(
    kind: str,
    salt: str,
    systems: Mapping[str, Served],
    llama: PeerProcess | None,
    texts: Sequence[tuple[Request | None, Request]],
) -> dict[str, float]:
    found: dict[str, float] = {}
    outputs: dict[str, list[list[int]]] = {}
    for source, system in systems.items():
        runs = []
        for first, request in texts:
            if first is not None:
                system.decode([first], ignore_eos=False, cache_salt=salt)
            runs.append(system.decode([request], ignore_eos=False, cache_salt=salt))
        outputs[source] = [run.tokens[0] for run in runs]
        if outputs[source] != outputs["off"]:
            raise BenchmarkError(f"{kind}: the tokens of {source} are not those of off")
        decoded = sum(len(run.tokens[0]) - 1 for run in runs)
        accepted = [sum(counts) for counts in zip(*(_filled(run.accepted) for run in runs), strict=True)]
        drafted = [sum(counts) for counts in zip(*(_filled(run.drafted) for run in runs), strict=True)]
        found[f"{source}_tokens_per_s"] = (decoded + len(runs)) / sum(run.wall_s for run in runs)
        found[f"{source}_tokens_per_step"] = decoded / (decoded - sum(accepted))
        for k, (num_accepted, num_drafted) in enumerate(zip(accepted, drafted, strict=True)):
            found[f"{source}_drafted_{k}"] = num_drafted
            found[f"{source}_acceptance_{k}"] = num_accepted / num_drafted if num_drafted else 0.0
        found[f"{source}_gain"] = found[f"{source}_tokens_per_s"] / found["off_tokens_per_s"]
    if llama is not None:
        found |= _llama_figures(llama, [request for _, request in texts], outputs["off"])
    return found


def _llama_figures(llama: PeerProcess, requests: Sequence[Request], expected: list[list[int]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for mode in _LLAMA_MODES:
        answers = [
            llama.call({"mode": mode, "prompt": each.prompt, "output_len": each.output_len, "stop_ids": [2]})
            for each in requests
        ]
        tokens = sum(len(answer["tokens"]) for answer in answers)
        same = sum(answer["tokens"] == each for answer, each in zip(answers, expected, strict=True))
        found[f"llama_{mode}_tokens_per_s"] = tokens / sum(answer["wall_s"] for answer in answers)
        found[f"llama_{mode}_tokens_per_step"] = tokens / sum(answer["num_steps"] for answer in answers)
        found[f"llama_{mode}_gain"] = found[f"llama_{mode}_tokens_per_s"] / found["llama_off_tokens_per_s"]
        found[f"llama_{mode}_same_outputs"] = same / len(answers)
    return found


def _llama(options: argparse.Namespace, longest: int) -> contextlib.AbstractContextManager[PeerProcess]:
    CACHE.mkdir(parents=True, exist_ok=True)
    progress("llama.cpp: one sequence, with llama-cpp-python's drafts")
    arguments = ["drafts", str(_DEMO), str(options.draft_model), str(longest), str(CACHE), "2", str(_NUM_DRAFTS)]
    return peer_process(options.llama_python, "benchmarks.peers.llama_cpp", arguments)


def _filled(counts: Sequence[int]) -> list[int]:
    return [*counts, *[0] * (_NUM_DRAFTS - len(counts))]
