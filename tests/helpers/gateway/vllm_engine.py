"""A client of vLLM's engine protocol that writes its own messages, as SMG does."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from gateway_svc.dialects import vllm_engine_pb2 as pb
from gateway_svc.dialects.vllm_engine_pb2_grpc import VllmEngineStub


@contextlib.asynccontextmanager
async def engine(address: str) -> AsyncIterator[Any]:
    """A stub."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield VllmEngineStub(channel)


def asked(
    ids: Sequence[int], *, stream: bool = True, request_id: str = "r", seed: int = 1, **params: Any
) -> pb.GenerateRequest:
    """A request; scalars that have no value are 0 or their neutral one."""
    given = {"top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 50, "seed": seed, **params}
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(original_text="Hello", input_ids=ids),
        sampling_params=pb.SamplingParams(**given),
        stream=stream,
    )
