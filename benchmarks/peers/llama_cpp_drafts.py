"""llama.cpp with drafts, through llama-cpp-python's `Llama.generate`: one sequence, greedy.

Its n-gram drafts are the package's `LlamaPromptLookupDecoding`, with its defaults; drafts of a model are made here by a
second `Llama`, as the package has no such class. Needs llama-cpp-python and gguf. Arguments: the model's folder, that
of the draft model or "", tokens of the longest request, a folder for the GGUF files, threads, drafts in a step of the
draft model. A question is `{"mode": "off", "ngram" or "draft", "prompt", "output_len", "stop_ids"}`, its answer
`{"wall_s", "tokens", "num_steps"}`.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.answering import answering
from benchmarks.peers.gguf_file import gguf_of


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


def main() -> None:
    """Load, report the version, then answer until stdin ends."""
    folder, small, longest, cache, num_threads, num_drafts = sys.argv[1:]
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


if __name__ == "__main__":
    main()
