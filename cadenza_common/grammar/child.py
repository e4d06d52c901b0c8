"""A process that compiles constraints, each in a process of its own, and answers what is wrong with each.

`python -m cadenza_common.grammar.child MAX_BYTES TOKENIZER_JSON VOCAB_SIZE EOS_ID ...`: makes the table of tokens, then
reads commands from stdin, each as JSON behind its length in 4 bytes:

- `{"id": N, "compile": {...}}`: a constraint, as a dict of its fields;
- `{"id": N, "yield": true}`: let everything else on the machine go before it;
- `{"id": N, "drop": true}`: nobody wants to know any more.

It writes answers to stdout in the same form: first `{"error": "..."}`, empty if the table is made, then for each
constraint `{"id": N, "pid": P}`, the process that compiles it, and `{"id": N, "error": "..."}`, empty if all is well,
or `{"id": N, "died": true}` if its process has ended without a word: for want of memory, or because it was dropped.
The compiler's recursion has no limit but its stack, which is the same on all machines: that it is used up is an error.
Each process has the table from this one, as a fork, which takes some milliseconds. All end with stdin.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

from cadenza_common.grammar.compiling import STACK_BYTES, GrammarError, error_of, new_matcher, short
from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.grammar.table import TableSource

_LONGEST_S = 60
_PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: a signal for the process when its parent ends."""
_AFTER_ALL = 10
"""The niceness of what has become slow."""
_TUPLES = ("choices", "start_after_token_ids")


def main(arguments: list[str], commands: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the commands end."""
    max_bytes, path, vocab_size, *eos = arguments
    resource.setrlimit(resource.RLIMIT_AS, (int(max_bytes), int(max_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        table = TableSource(Path(path), int(vocab_size), tuple(map(int, eos))).table()
    except Exception as error:
        _write(answers, {"error": short(f"{type(error).__name__}: {error}")})
        return
    _write(answers, {"error": ""})
    _Compilations(table, commands, answers).run()


class _Compilations:
    """The processes that compile, each at the other end of a pipe."""

    def __init__(self, table: Any, commands: BinaryIO, answers: BinaryIO) -> None:
        self._table, self._commands, self._answers = table, commands, answers
        self._ids: dict[int, int] = {}
        """Of the constraint that is compiled at the end of each pipe, by its file descriptor."""
        self._pids: dict[int, int] = {}
        """Of the process that compiles a constraint, by the constraint's id."""

    def run(self) -> None:
        """Answer until the commands end."""
        stdin = self._commands.fileno()
        try:
            while True:
                readable, _, _ = select.select([stdin, *self._ids], [], [])
                for pipe in readable:
                    if pipe != stdin:
                        self._answer(pipe)
                if stdin in readable and not self._obey():
                    return
        finally:
            for pid in self._pids.values():
                os.kill(pid, signal.SIGKILL)

    def _obey(self) -> bool:
        """Carry out the next command; returns whether there was one."""
        prefix = self._read(4)
        if len(prefix) < 4:
            return False
        command = json.loads(self._read(int.from_bytes(prefix, "little")))
        number = command["id"]
        if (content := command.get("compile")) is not None:
            self._fork(number, content)
        elif (pid := self._pids.get(number)) is not None:
            # It is no other process: its number is free only once this one has waited for it.
            if command.get("drop"):
                os.kill(pid, signal.SIGKILL)
            else:
                os.setpriority(os.PRIO_PROCESS, pid, _AFTER_ALL)
        return True

    def _read(self, count: int) -> bytes:
        """Return so many bytes of the commands, fewer only at their end."""
        content = b""
        while part := self._commands.read(count - len(content)):
            content += part
        return content

    def _fork(self, number: int, content: dict[str, Any]) -> None:
        readable, writable = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            self._compile(content, writable, parent, unused=(readable, *self._ids))
        os.close(writable)
        self._ids[readable], self._pids[number] = number, pid
        _write(self._answers, {"id": number, "pid": pid})

    def _compile(self, content: dict[str, Any], writable: int, parent: int, unused: tuple[int, ...]) -> None:
        """Write what is wrong with a constraint, in the process that is there for it, and end that."""
        try:
            # In case that nobody is left to end it.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                return
            signal.alarm(_LONGEST_S)
            for pipe in (self._commands.fileno(), self._answers.fileno(), *unused):
                os.close(pipe)
            os.write(writable, b"." + _on_its_stack(content, self._table).encode())
        finally:
            os._exit(0)

    def _answer(self, pipe: int) -> None:
        """Pass on what a process has written, and wait for its end."""
        content = b""
        while part := os.read(pipe, 65536):
            content += part
        os.close(pipe)
        number = self._ids.pop(pipe)
        _, status = os.waitpid(self._pids.pop(number), 0)
        if content:
            answer: dict[str, Any] = {"error": content[1:].decode()}
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV:
            answer = {"error": f"it is nested too deeply: the compiler has {STACK_BYTES // 2**20} MiB of stack"}
        else:
            answer = {"died": True}
        _write(self._answers, {"id": number} | answer)


def _on_its_stack(content: dict[str, Any], table: Any) -> str:
    """As `what_is_wrong`, on a stack of the same size on all machines: the compiler's recursion has no other limit."""
    found: list[str] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: found.append(what_is_wrong(content, table)))
    thread.start()
    thread.join()
    return found[0]


def what_is_wrong(content: dict[str, Any], table: Any) -> str:
    """Return why a constraint, as a dict of its fields, cannot be followed; empty if it can."""
    values: dict[str, Any] = {name: tuple(value) if name in _TUPLES else value for name, value in content.items()}
    spec = GrammarSpec(**values)
    try:
        matcher = new_matcher(spec, table)
        # The first mask is work too, which a limit may end, and so are the first tokens that it leaves no choice of.
        matcher.compute_bitmask()
        matcher.compute_ff_tokens()
        if matcher.is_error():
            return error_of(matcher, spec)
    except GrammarError as error:
        return str(error)
    except MemoryError:
        os._exit(0)
    except BaseException as error:  # llguidance's panics are no Exceptions
        return short(f"{type(error).__name__}: {error}")
    return ""


def _write(answers: BinaryIO, answer: dict[str, Any]) -> None:
    content = json.dumps(answer).encode()
    answers.write(len(content).to_bytes(4, "little") + content)
    answers.flush()


if __name__ == "__main__":
    # Without a buffer, so that what is there to read is what `select` says.
    main(sys.argv[1:], open(0, "rb", buffering=0, closefd=False), sys.stdout.buffer)  # noqa: SIM115
