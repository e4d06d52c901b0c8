"""llama.cpp through llama-cpp-python, as two peers, and ik_llama.cpp. Needs the package of its library, and gguf.

Batches, by low-level calls: the simplest loop that keeps them full, for the package has no batching server. Each step
is one `llama_decode`: a token of every running sequence and the whole prompts of new ones, greedy from the raw logits.
Arguments: the model's folder, tokens of the longest request, a folder for the GGUF file, threads, its weights (bf16 or
a quantized type), and `llama.cpp` or `ik_llama.cpp`. A question is `{"requests": [{"prompt", "output_len"}],
"arrivals": null or seconds}`, its answer `{"wall_s", "times": [[first, last, tokens, due]]}` in seconds.

One sequence with drafts, by `Llama.generate`, greedy: n-gram drafts are the package's `LlamaPromptLookupDecoding` with
its defaults; drafts of a model are made here by a second `Llama`, as the package has no such class. Arguments:
`drafts`, the model's folder, that of the draft model or "", tokens of the longest request, a folder for the GGUF files,
threads, drafts in a step of the draft model. A question is `{"mode": "off", "ngram" or "draft", "prompt", "output_len",
"stop_ids"}`, its answer `{"wall_s", "tokens", "num_steps"}`.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.answering import answering
from benchmarks.peers.gguf_file import gguf_of
from benchmarks.peers.ik_llama import IkLibrary


class Speculation:
    """A target, and what drafts for it."""

    def __init__(self, target: Any, small: Any | None, num_drafts: int) -> None:
        self._target, self._small, self._num_drafts = target, small, num_drafts
        self._numpy = importlib.import_module("numpy")
        lookup = importlib.import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding
        self._sources = {"off": None, "ngram": lookup(), "draft": self._drafts}
        self._num_steps = 0
        inner = target.eval

        def counted(tokens: Sequence[int]) -> None:
            self._num_steps += 1
            inner(tokens)

        target.eval = counted

    def generate(self, question: dict[str, Any]) -> dict[str, Any]:
        """Generate one output, and count the target's steps."""
        target = self._target
        target.draft_model = self._sources[question["mode"]]
        target.reset()
        self._num_steps = 0
        start = time.perf_counter()
        tokens: list[int] = []
        for token in target.generate(question["prompt"], temp=0.0, repeat_penalty=1.0):
            tokens.append(int(token))
            if token in question["stop_ids"] or len(tokens) == question["output_len"]:
                break
        return {"wall_s": time.perf_counter() - start, "tokens": tokens, "num_steps": self._num_steps}

    def _drafts(self, input_ids: Any, /, **_: Any) -> Any:
        assert self._small is not None
        made = self._small.generate(input_ids.tolist(), temp=0.0, repeat_penalty=1.0)
        return self._numpy.array(list(itertools.islice(made, self._num_drafts)), dtype=self._numpy.intc)


def _answer_drafts(arguments: list[str]) -> None:
    """Load, report the version, then answer until stdin ends."""
    folder, small, longest, cache, num_threads, num_drafts = arguments
    with answering() as answer:
        library = importlib.import_module("llama_cpp")

        def load(model: str) -> Any:
            return library.Llama(
                str(gguf_of(Path(model), Path(cache), "bf16")), n_ctx=int(longest), n_threads=int(num_threads),
                n_threads_batch=int(num_threads), logits_all=True, verbose=False,
            )  # fmt: skip

        speculation = Speculation(load(folder), load(small) if small else None, int(num_drafts))
        answer({"version": library.__version__, "threads": int(num_threads)})
        for line in sys.stdin:
            answer(speculation.generate(json.loads(line)))


MAX_SLOTS = 16
"""Sequences at once: 32 were no faster."""
MAX_BATCH_TOKENS = 512


@dataclass(slots=True)
class RunningSequence:
    """A running request."""

    index: int
    position: int  # of its last token
    output_len: int
    token: int = 0
    num_tokens: int = 0
    first_s: float = 0.0


@dataclass(slots=True)
class Batch:
    """The input of the next `llama_decode`."""

    native: Any
    rows: dict[int, int] = field(default_factory=dict)  # slot -> row whose logits are needed

    def clear(self) -> None:
        """Empty it."""
        self.native.n_tokens = 0
        self.rows.clear()

    def add(self, slot: int, token: int, position: int, *, sample: bool) -> None:
        """Add a token of a sequence."""
        native, row = self.native, self.native.n_tokens
        native.token[row], native.pos[row] = token, position
        native.n_seq_id[row], native.seq_id[row][0], native.logits[row] = 1, slot, sample
        native.n_tokens = row + 1
        if sample:
            self.rows[slot] = row


class Engine:
    """A loaded model with `num_slots` sequence slots."""

    def __init__(self, library: Any, model: Any, num_slots: int, longest: int, num_threads: int) -> None:
        self._library = library
        self._numpy = importlib.import_module("numpy")
        params = library.llama_context_default_params()
        batch_tokens = max(MAX_BATCH_TOKENS, longest)
        params.n_ctx = num_slots * longest
        params.n_batch = params.n_ubatch = batch_tokens
        params.n_seq_max = num_slots
        params.n_threads = params.n_threads_batch = num_threads
        params.kv_unified = True
        params.no_perf = True
        self._context = library.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama_init_from_model failed")
        self._memory = library.llama_get_memory(self._context)
        self._num_vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        self._batch = Batch(library.llama_batch_init(batch_tokens, 0, 1))
        self._batch_tokens = batch_tokens
        self._num_slots = num_slots

    def serve(self, requests: list[dict[str, Any]], arrivals: list[float] | None) -> dict[str, Any]:
        """Serve all requests in the order of arrival."""
        due = arrivals or [0.0] * len(requests)
        times: list[list[float]] = [[]] * len(requests)
        waiting = list(range(len(requests)))[::-1]
        free, running = list(range(self._num_slots)), dict[int, RunningSequence]()
        start = time.perf_counter()
        while waiting or running:
            now = time.perf_counter() - start
            self._batch.clear()
            for slot, sequence in running.items():
                self._batch.add(slot, sequence.token, sequence.position, sample=True)
            while waiting and free and due[waiting[-1]] <= now and self._has_room(requests[waiting[-1]]["prompt"]):
                index, slot = waiting.pop(), free.pop()
                running[slot] = self._join(slot, index, requests[index])
            if not running:
                time.sleep(max(0.0, due[waiting[-1]] - now))
                continue
            for slot, sequence in self._step(running, start):
                now = time.perf_counter() - start
                times[sequence.index] = [sequence.first_s, now, sequence.num_tokens, due[sequence.index]]
                self._library.llama_memory_seq_rm(self._memory, slot, -1, -1)
                free.append(slot)
                del running[slot]
        return {"wall_s": time.perf_counter() - start, "times": times}

    def _has_room(self, prompt: list[int]) -> bool:
        return int(self._batch.native.n_tokens) + len(prompt) <= self._batch_tokens

    def _join(self, slot: int, index: int, request: dict[str, Any]) -> RunningSequence:
        prompt = request["prompt"]
        for position, token in enumerate(prompt):
            self._batch.add(slot, token, position, sample=position == len(prompt) - 1)
        return RunningSequence(index, len(prompt) - 1, request["output_len"])

    def _step(self, running: dict[int, RunningSequence], start: float) -> list[tuple[int, RunningSequence]]:
        """Compute the batch and take its tokens; returns the sequences that have ended."""
        code = self._library.llama_decode(self._context, self._batch.native)
        if code:
            raise RuntimeError(f"llama_decode failed with {code}")
        tokens = {slot: self._greedy(row) for slot, row in self._batch.rows.items()}
        now = time.perf_counter() - start
        for slot, token in tokens.items():
            sequence = running[slot]
            sequence.token = token
            sequence.position += 1
            sequence.num_tokens += 1
            sequence.first_s = sequence.first_s or now
        return [(slot, sequence) for slot, sequence in running.items() if sequence.num_tokens == sequence.output_len]

    def _greedy(self, row: int) -> int:
        logits = self._library.llama_get_logits_ith(self._context, row)
        return int(self._numpy.ctypeslib.as_array(logits, (self._num_vocab,)).argmax())


def _answer_batches(arguments: list[str]) -> None:
    """Load, report the version, then answer until stdin ends; fewer requests than slots get a smaller context."""
    folder, longest, cache, num_threads = Path(arguments[0]), int(arguments[1]), Path(arguments[2]), int(arguments[3])
    weights, own = arguments[4], arguments[5] == "llama.cpp"
    with answering() as answer:
        library = importlib.import_module("llama_cpp") if own else IkLibrary()
        quiet = library.llama_log_callback(lambda *_: None)
        library.llama_log_set(quiet, ctypes.c_void_p(0))
        library.llama_backend_init()
        path = gguf_of(folder, cache, weights)
        model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        if not model:
            raise RuntimeError(f"{path}: {arguments[5]} does not load it")
        built_for = library.llama_print_system_info().decode()
        answer(
            {
                "version": library.__version__,
                "weights": weights,
                "threads": num_threads,
                "max_slots": MAX_SLOTS,
                "built_for": built_for,
            }
        )
        engines: dict[int, Engine] = {}
        for line in sys.stdin:
            question = json.loads(line)
            num_slots = min(MAX_SLOTS, len(question["requests"]))
            if num_slots not in engines:
                engines[num_slots] = Engine(library, model, num_slots, longest, num_threads)
            answer(engines[num_slots].serve(question["requests"], question["arrivals"]))


def main() -> None:
    """Answer batches, or one sequence with drafts if the first argument is `drafts`."""
    if sys.argv[1] == "drafts":
        _answer_drafts(sys.argv[2:])
    else:
        _answer_batches(sys.argv[1:])


if __name__ == "__main__":
    main()
