"""A process that compiles constraints as they come, and answers what is wrong with each.

`python -m cadenza.grammar.child MAX_BYTES TOKENIZER_JSON VOCAB_SIZE EOS_ID ...`: reads constraints from stdin, each as
JSON behind its length in 4 bytes, and writes the answers to stdout in the same form: a text, empty if all is well. The
first answer says that the table of tokens is made. It ends with its stdin.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

from cadenza.grammar.compiling import STACK_BYTES, GrammarError, new_matcher, short
from cadenza.grammar.spec import GrammarSpec
from cadenza.grammar.table import TableSource

_LONGEST_S = 60
_TUPLES = ("choices", "start_after_token_ids")


def main(arguments: list[str], requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the requests end."""
    max_bytes, path, vocab_size, *eos = arguments
    resource.setrlimit(resource.RLIMIT_AS, (int(max_bytes), int(max_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        table = TableSource(Path(path), int(vocab_size), tuple(map(int, eos))).table()
    except Exception as error:
        _write(answers, short(f"{type(error).__name__}: {error}"))
        return
    _write(answers, "")
    while len(prefix := requests.read(4)) == 4:
        content = json.loads(requests.read(int.from_bytes(prefix, "little")))
        # In case that nobody is left to end it: the signal's default ends the process, whatever it does.
        signal.alarm(_LONGEST_S)
        answer = _on_its_stack(content, table)
        signal.alarm(0)
        _write(answers, answer)


def _on_its_stack(content: dict[str, Any], table: Any) -> str:
    """As `what_is_wrong`, on a stack of the same size on all machines: the compiler's recursion has no other limit."""
    found: list[str] = []
    former = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=lambda: found.append(what_is_wrong(content, table)))
        thread.start()
    finally:
        threading.stack_size(former)
    thread.join()
    return found[0]


def what_is_wrong(content: dict[str, Any], table: Any) -> str:
    """Return why a constraint, as a dict of its fields, cannot be followed; empty if it can."""
    values: dict[str, Any] = {name: tuple(value) if name in _TUPLES else value for name, value in content.items()}
    spec = GrammarSpec(**values)
    try:
        matcher = new_matcher(spec, table)
        # The first mask is work too, which a limit may end.
        matcher.compute_bitmask()
        if matcher.is_error():
            return short(matcher.get_error())
    except GrammarError as error:
        return str(error)
    except Exception as error:
        return short(f"{type(error).__name__}: {error}")
    return ""


def _write(answers: BinaryIO, text: str) -> None:
    content = text.encode()
    answers.write(len(content).to_bytes(4, "little") + content)
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin.buffer, sys.stdout.buffer)
