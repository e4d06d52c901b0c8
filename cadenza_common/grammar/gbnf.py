"""GBNF in Lark's notation. llguidance's converter is Python, which holds the interpreter: a second for 200,000
characters. So a long grammar is converted in a process of its own, with bounds on its time and memory.

`python -m cadenza_common.grammar.gbnf`: converts stdin, and exits with 1 and the reason on stdout if it cannot.
"""

from __future__ import annotations

import resource
import subprocess
import sys

_LONG_CHARS = 4096
"""Of a grammar that takes over 10 ms here."""
_MAX_CPU_S = 10
_MAX_BYTES = 2**30


def as_lark(text: str, *, apart: bool) -> str:
    """Return a grammar of either notation in Lark's; raises Exception for one that cannot be converted.

    apart: a long one in another process.
    """
    from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

    if not apart or len(text) <= _LONG_CHARS or is_lark_syntax(text):
        return str(any_to_lark(text))
    command = [sys.executable, "-m", "cadenza_common.grammar.gbnf"]
    done = subprocess.run(command, input=text.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    if done.returncode < 0:
        raise ValueError(f"it takes over {_MAX_CPU_S} s, or {_MAX_BYTES // 2**20} MiB of memory")
    answer = done.stdout.decode()
    if done.returncode:
        raise ValueError(answer)
    return answer


def main() -> int:
    """Convert stdin; returns the exit code."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S))
    try:
        answer, code = as_lark(sys.stdin.buffer.read().decode(), apart=False), 0
    except Exception as error:
        answer, code = str(error), 1
    sys.stdout.buffer.write(answer.encode())
    return code


if __name__ == "__main__":
    sys.exit(main())
