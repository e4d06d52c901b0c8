"""A process that renders chats as they come: a template may do what it likes with its memory and its time.

`python -m scheduler_svc.requests.chats.child MAX_BYTES`: reads jobs of `renderer` from stdin, each pickled behind its
length in 4 bytes, and writes the answers of `answer` to stdout in the same form; a first, empty answer says that it is
ready. It ends with its stdin.
"""

from __future__ import annotations

import functools
import pickle
import resource
import signal
import sys
from typing import BinaryIO

import jinja2

from scheduler_svc.requests.chats.fields import ChatError, ChatJob, failed, rendered
from scheduler_svc.requests.chats.template import compile_template, render

_LONGEST_S = 60
_NUM_TEMPLATES = 16


def main(arguments: list[str], jobs: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the jobs end."""
    max_bytes = int(arguments[0])
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _write(answers, b"")
    while len(prefix := jobs.read(4)) == 4:
        job: ChatJob = pickle.loads(jobs.read(int.from_bytes(prefix, "little")))
        # In case that nobody is left to end it: the signal's default ends the process, whatever it does.
        signal.alarm(_LONGEST_S)
        content = answer(job)
        signal.alarm(0)
        _write(answers, content)


def _write(answers: BinaryIO, content: bytes) -> None:
    answers.write(len(content).to_bytes(4, "little") + content)
    answers.flush()


def answer(job: ChatJob) -> bytes:
    """Return the text of a chat, or what is wrong with it."""
    try:
        return rendered(render(_compiled(job.template, job.field), job.chat, job.special_tokens, job.form))
    except ChatError as error:
        return failed(error)


@functools.lru_cache(_NUM_TEMPLATES)
def _compiled(source: str, field: str) -> jinja2.Template:
    return compile_template(source, field)


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin.buffer, sys.stdout.buffer)
