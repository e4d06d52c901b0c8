"""Step records, a server's state and its screens for the tests of `cadenza top`."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import datetime

from rich.console import Console

from cadenza.errors import UnavailableError
from cadenza.info import ExecutorInfo, ServerInfo, ServerLoad
from cadenza.v1 import admin_pb2 as pb
from cadenza.v1 import execution_pb2
from cadenza_cli.top.figures import Lost, ServerFigures
from cadenza_cli.top.meter import Meter
from cadenza_cli.top.view import Screen, TopView

MS = 10**6
NOON = datetime(2026, 11, 23, 12, 0).timestamp()
LOST = Lost(UnavailableError("no service at 127.0.0.1:50051\x1b[2J: nothing listens there"), 3.4)
SIZES = [(80, 24), (50, 12)]


def info(now_s: float, *, num_executors: int = 1, **load: int) -> ServerInfo:
    """A server that has been up for `now_s`."""
    executors = [
        ExecutorInfo(f"host:{index}", True, 2**63 + index, 3, "cpu", 16, 2, 40, 2**30, index=index)
        for index in range(num_executors)
    ]
    counts = dict.fromkeys(ServerLoad.__dataclass_fields__, 0) | load
    return ServerInfo("0.1.0", 1, {"max_num_seqs": "4"}, ServerLoad(**counts), executors, now_s, False, 2**20)


def record(
    at_s: float, work=(), *, joined=(), left=(), executor=0, total_ms=10, failed=False, waiting=0, ttfts_ms=(), **fields
):
    """Done at `at_s`. `work`: (sequence, tokens, context length, sampled); `joined`: (sequence, prompt tokens)."""
    columns = list(zip(*work, strict=True)) or [(), (), (), ()]
    status = execution_pb2.STEP_STATUS_FAILED if failed else execution_pb2.STEP_STATUS_OK
    return pb.StepRecord(
        executor_index=executor,
        planned_ns=round(at_s * 1e9),
        applied_ns=round(at_s * 1e9),
        status=status,
        timings=execution_pb2.StepTimings(total_ns=total_ms * MS, device_ns=total_ms * MS // 2),
        sequence_ids=columns[0],
        num_tokens=columns[1],
        context_lens=columns[2],
        num_sampled=columns[3],
        joined=[pb.SequenceJoined(sequence_id=s, num_prompt_tokens=n) for s, n in joined],
        left=[pb.SequenceLeft(sequence_id=s) for s in left],
        first_token_ns=[each * MS for each in ttfts_ms],
        load=pb.StepLoad(num_waiting=waiting),
        **fields,
    )


def busy_interval() -> ServerFigures:
    """Two seconds of two sequences on one executor and one on another."""
    meter = Meter(info(10.0, num_executors=2, num_output_tokens=100), 0.0, model="models/a-model")
    records = [
        record(10.5, [(1, 6, 0, 1), (2, 4, 0, 0)], joined=[(1, 6), (2, 5)], waiting=1, ttfts_ms=[20]),
        record(11.0, [(1, 1, 6, 1), (2, 1, 4, 1)], total_ms=30, waiting=1, ttfts_ms=[30]),
        record(11.2, [(7, 1, 9, 1)], executor=1, total_ms=4, waiting=1),
        record(11.5, [(1, 1, 7, 1)], preempted_ids=[2], swapped_out_ids=[2], total_ms=20, waiting=1),
        record(11.6, failed=True, waiting=1),
    ]
    meter.add(records, 0)
    counts = {"num_output_tokens": 105, "num_preemptions": 1, "num_prefix_queries": 20, "num_prefix_hits": 5}
    now = {"num_waiting": 1, "num_running": 2, "num_swapped": 1, "num_device_blocks": 8, "num_used_device_blocks": 2}
    return meter.snapshot(info(12.0, num_executors=2, **counts, **now))


def drafting() -> ServerFigures:
    """Two executors over two seconds, the first of which drafts: 9 tokens of 4 sequences' steps, 5 of 8 drafts."""

    def server(now_s: float, num_drafts: int, num_accepted: int) -> ServerInfo:
        counts = {"num_drafts": num_drafts, "num_accepted_drafts": num_accepted}
        plain = info(now_s, num_executors=2, **counts)
        first, second = plain.executors
        return replace(plain, executors=[replace(first, max_drafts=3, **counts), second])

    meter = Meter(server(10.0, 100, 50), 0.0, model="models/a-model")
    records = [
        record(10.5, [(1, 6, 0, 1), (2, 1, 0, 0)], joined=[(1, 6), (2, 2)]),
        record(11.0, [(1, 1, 6, 3), (2, 1, 1, 1)]),
        record(11.1, [(1, 1, 9, 4), (2, 1, 2, 1)]),
        record(11.2, [(2, 1, 3, 1), (1, 1, 13, 0)]),
        record(11.3, [(7, 1, 9, 1)], executor=1),
    ]
    meter.add(records, 0)
    return meter.snapshot(server(12.0, 108, 55))


def alone() -> ServerFigures:
    """The same server with its first executor alone."""
    return replace(busy_interval(), executors=busy_interval().executors[:1])


def view_of(*observations: ServerFigures | Lost, ascii_only: bool = False) -> TopView:
    view = TopView("127.0.0.1:50051", ascii_only=ascii_only, now=lambda: NOON)
    for each in observations:
        view.add(each)
    return view


def screen(view: TopView, size: tuple[int, int], *, page: Screen = Screen.OVERVIEW) -> list[str]:
    """The lines that a terminal of this size shows."""
    console = Console(file=io.StringIO(), width=size[0], height=size[1])
    text = view.screen(*size, page=page, foot="q quit  d details")
    console.print(text, no_wrap=True, overflow="crop")
    lines = [line.rstrip() for line in console.file.getvalue().removesuffix("\n").split("\n")]
    assert len(lines) == size[1]
    assert lines[-1] == "q quit  d details"
    return lines
