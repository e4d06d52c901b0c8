"""The model, the server and its load in the words of the engine protocol."""

from __future__ import annotations

import time
from collections import deque
from datetime import UTC, datetime

from cadenza import __version__
from cadenza.info import ModelInfo, ServerInfo
from gateway_svc.dialects import vllm_engine_pb2 as pb

SERVER_TYPE = "vllm-grpc"
"""What routers look for; the protocol is the same."""
_WINDOW_S = 10.0


def model_info(info: ModelInfo, name: str) -> pb.GetModelInfoResponse:
    """The model."""
    return pb.GetModelInfoResponse(
        model_path=info.model,
        is_generation=True,
        max_context_length=info.max_model_len,
        vocab_size=info.vocab_size,
        served_model_name=name,
        model_type=info.model_type,
        architectures=[info.architecture],
        eos_token_ids=info.eos_token_ids,
        pad_token_id=info.eos_token_ids[0] if info.eos_token_ids else 0,
        bos_token_id=info.bos_token_id or 0,
        max_req_input_len=info.max_model_len,
    )


def server_info(info: ServerInfo, model: ModelInfo) -> pb.GetServerInfoResponse:
    """The server; without executors for a tenant without admin."""
    return pb.GetServerInfoResponse(
        active_requests=info.load.num_running + info.load.num_waiting + info.load.num_swapped,
        is_paused=info.draining,
        uptime_seconds=info.uptime_s,
        server_type=SERVER_TYPE,
        data_parallel_size=1,
        kv_cache_dtype="auto",
        block_size=_block_size(info),
        model_dtype=model.dtype,
        max_num_seqs=_max_num_seqs(info),
        constrained_decoding_start="first_token",
    )


class Loads:
    """The load, with rates over the last calls."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        """(time, output tokens since start)"""

    def message(self, info: ServerInfo) -> pb.GetLoadsResponse:
        """The load as of now, as one rank."""
        load, used = info.load, info.load.num_used_device_blocks
        usage = used / load.num_device_blocks if load.num_device_blocks else 0.0
        window = _max_num_seqs(info)
        rank = pb.SchedulerLoad(
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting + load.num_swapped,
            num_total_reqs=load.num_running + load.num_waiting + load.num_swapped,
            num_used_tokens=used * _block_size(info),
            max_total_num_tokens=load.num_device_blocks * _block_size(info),
            token_usage=usage,
            gen_throughput=self._throughput(load.num_output_tokens),
            cache_hit_rate=load.num_prefix_hits / load.num_prefix_queries if load.num_prefix_queries else 0.0,
            utilization=load.num_running / window if window else usage,
            max_running_requests=window,
        )
        timestamp = datetime.now(UTC).isoformat()
        return pb.GetLoadsResponse(timestamp=timestamp, version=__version__, dp_rank_count=1, loads=[rank])

    def _throughput(self, num_tokens: int) -> float:
        """Output tokens a second over some 10 s."""
        now, seen = time.monotonic(), self._seen
        if seen and num_tokens < seen[-1][1]:  # another process of the scheduler
            seen.clear()
        seen.append((now, num_tokens))
        while len(seen) > 2 and now - seen[1][0] >= _WINDOW_S:
            seen.popleft()
        span = now - seen[0][0]
        return (num_tokens - seen[0][1]) / span if span > 0 else 0.0


def _block_size(info: ServerInfo) -> int:
    return next((each.block_size for each in info.executors if each.block_size), 0)


def _max_num_seqs(info: ServerInfo) -> int:
    return sum(each.max_num_seqs for each in info.executors)
