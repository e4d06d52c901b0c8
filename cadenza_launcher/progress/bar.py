"""The progress bar of `LLM.generate` and `LLM.chat`, on stderr: vLLM's, and a shorter one where that does not fit."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from cadenza.errors import CadenzaError
from cadenza.outputs import RequestOutput

UseTqdm = bool | Callable[..., Any]
"""True: a bar of tqdm; False: none; a callable with the arguments of `tqdm`, such as a subclass: the bar it returns."""


_REFRESH_S = 0.5


@contextlib.contextmanager
def prompts_bar(
    num_prompts: int, use_tqdm: UseTqdm, count_output: Callable[[], int]
) -> Iterator[Callable[[RequestOutput], None]]:
    """A bar over finished prompts, and the function that each result is given to.

    Its rates are tokens per second since the start: inputs of finished prompts, as in vLLM, and outputs as the server
    counts them (`count_output`, called on a thread of the bar), in the end those of the prompts. The last state stays
    on the screen, after an error too.
    """
    if not use_tqdm:
        yield lambda output: None
        return
    bar = _Bar(num_prompts, use_tqdm)
    try:
        with _refreshing(bar, count_output):
            yield bar.add
    finally:
        bar.close()


@contextlib.contextmanager
def _refreshing(bar: _Bar, count_output: Callable[[], int]) -> Iterator[None]:
    """Show the time and the server's count again and again, also while no prompt ends."""
    running = threading.Lock()  # held until the end; KeyboardInterrupt cannot break a bare lock

    def refresh() -> None:
        before: int | None = None
        while not running.acquire(timeout=_REFRESH_S):
            try:
                count = count_output()
            except CadenzaError:  # of a server that is away; the call that waits for it reports the error
                continue
            before = count if before is None else before
            bar.refresh(count - before)

    running.acquire()
    thread = threading.Thread(target=refresh, name="cadenza-progress-bar", daemon=True)
    thread.start()
    try:
        yield
    finally:
        running.release()
        thread.join()


_WIDE_COLUMNS = 120
"""Of a terminal that shows vLLM's whole bar; with fewer, tqdm would cut off the tokens per second at its end."""
_SHORT_FORMAT = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_NARROW_COLUMNS = 65
"""With fewer, the bar has the speed of outputs alone."""


class _Bar:
    def __init__(self, num_prompts: int, use_tqdm: UseTqdm) -> None:
        from tqdm.auto import tqdm  # plain in a terminal, a widget in a notebook

        self._num_prompts = num_prompts
        self._num_ended = self._num_input_tokens = self._num_output_tokens = self._num_counted_tokens = 0
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
        self._num_ended += 1
        self._bar.set_postfix_str(self._rates(), refresh=False)
        self._bar.update(1)

    def refresh(self, num_output_tokens: int) -> None:
        """Show the time, and the output tokens of all prompts so far."""
        self._num_counted_tokens = num_output_tokens
        self._bar.set_postfix_str(self._rates())

    def close(self) -> None:
        self._bar.close()

    def _rates(self) -> str:
        elapsed_s = max(time.monotonic() - self._started, 1e-9)
        num_output = self._num_output_tokens
        if self._num_ended < self._num_prompts:
            num_output = max(num_output, self._num_counted_tokens)
        speed_in, speed_out = self._num_input_tokens / elapsed_s, num_output / elapsed_s
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
