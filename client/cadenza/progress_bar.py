"""The progress bar of `LLM.generate` and `LLM.chat`, on stderr: vLLM's, and a shorter one where that does not fit."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from cadenza.outputs import RequestOutput

UseTqdm = bool | Callable[..., Any]
"""True: a bar of tqdm; False: none; a callable with the arguments of `tqdm`, such as a subclass: the bar it returns."""


@contextlib.contextmanager
def prompts_bar(num_prompts: int, use_tqdm: UseTqdm) -> Iterator[Callable[[RequestOutput], None]]:
    """A bar over finished prompts, and the function that each result is given to.

    Its rates count the tokens of finished prompts, in tokens per second since the start, as vLLM's do. The last state
    stays on the screen, after an error too.
    """
    if not use_tqdm:
        yield lambda output: None
        return
    bar = _Bar(num_prompts, use_tqdm)
    try:
        yield bar.add
    finally:
        bar.close()


_WIDE_COLUMNS = 120
"""Of a terminal that shows vLLM's whole bar; with fewer, tqdm would cut off the tokens per second at its end."""
_SHORT_FORMAT = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_NARROW_COLUMNS = 65
"""With fewer, the bar has the speed of outputs alone."""


class _Bar:
    def __init__(self, num_prompts: int, use_tqdm: UseTqdm) -> None:
        from tqdm.auto import tqdm  # plain in a terminal, a widget in a notebook

        self._num_input_tokens = self._num_output_tokens = 0
        self._started = time.monotonic()
        # A terminal that does not state its width, and what is no terminal, get the whole bar.
        self._columns = _columns() if use_tqdm is True else 0
        self._is_short = 0 < self._columns < _WIDE_COLUMNS
        make = use_tqdm if callable(use_tqdm) else tqdm
        self._bar = make(
            total=num_prompts,
            desc="Processed prompts",
            dynamic_ncols=True,
            postfix=self._rates(),
            **({"bar_format": _SHORT_FORMAT} if self._is_short else {}),
        )

    def add(self, output: RequestOutput) -> None:
        """Count a prompt that has ended."""
        # Every sample reads the prompt, as in vLLM.
        self._num_input_tokens += len(output.prompt_token_ids or ()) * len(output.outputs)
        self._num_output_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        self._bar.set_postfix_str(self._rates(), refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()

    def _rates(self) -> str:
        elapsed_s = max(time.monotonic() - self._started, 1e-9)
        speed_in, speed_out = self._num_input_tokens / elapsed_s, self._num_output_tokens / elapsed_s
        if not self._is_short:
            return f"est. speed input: {speed_in:.2f} toks/s, output: {speed_out:.2f} toks/s"
        if self._columns < _NARROW_COLUMNS:
            return f"{speed_out:.0f} toks/s"
        return f"input {speed_in:.0f}, output {speed_out:.0f} toks/s"


def _columns() -> int:
    """The width of the terminal on stderr; 0: there is none, or it does not state it."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 0
