"""A client of KServe's gRPC protocol that writes its own messages, as Triton's client does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc

from gateway_svc.dialects import inference_pb2 as pb
from gateway_svc.dialects.inference_pb2_grpc import GRPCInferenceServiceStub


def texts(raw: bytes) -> list[str]:
    """The texts of a BYTES tensor."""
    found, at = [], 0
    while at < len(raw):
        (length,) = struct.unpack_from("<I", raw, at)
        found.append(raw[at + 4 : at + 4 + length].decode())
        at += 4 + length
    return found


def request(prompt: str, request_id: str = "", model: str = "", **inputs: Any) -> pb.ModelInferRequest:
    """A request; inputs: booleans and, as sampling_parameters, an object."""
    message = pb.ModelInferRequest(model_name=model, id=request_id)
    for name, value in {"text_input": prompt, **inputs}.items():
        if isinstance(value, bool):
            message.inputs.add(name=name, datatype="BOOL", shape=[1])
            message.raw_input_contents.append(bytes([value]))
            continue
        raw = (value if isinstance(value, str) else json.dumps(value)).encode()
        message.inputs.add(name=name, datatype="BYTES", shape=[1])
        message.raw_input_contents.append(struct.pack("<I", len(raw)) + raw)
    return message


def outputs(response: pb.ModelInferResponse) -> dict[str, Any]:
    """The values of each output."""
    formats = {"FP32": "f", "UINT32": "I"}
    values: dict[str, Any] = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        count = tensor.shape[0]
        kind = formats.get(tensor.datatype)
        values[tensor.name] = texts(raw) if kind is None else list(struct.unpack(f"<{count}{kind}", raw))
        assert len(values[tensor.name]) == count
    return values


def is_final(response: pb.ModelInferResponse) -> bool:
    """Whether it is its request's last answer."""
    return response.parameters["triton_final_response"].bool_param


class Stream:
    """One ModelStreamInfer."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.answers: dict[str, list[pb.ModelInferResponse]] = {}
        self.errors: dict[str, str] = {}

    async def send(self, message: pb.ModelInferRequest) -> None:
        """Send a request."""
        await self.call.write(message)

    async def read(self) -> pb.ModelStreamInferResponse:
        """The next answer."""
        async with asyncio.timeout(20):
            answer = await self.call.read()
        assert isinstance(answer, pb.ModelStreamInferResponse), "the stream ended"
        return answer

    async def collect(self, *request_ids: str) -> None:
        """Read until each of these has its final answer, or an error."""
        waiting = set(request_ids)
        while waiting:
            answer = await self.read()
            response = answer.infer_response
            if answer.error_message:
                self.errors[response.id] = answer.error_message
            else:
                self.answers.setdefault(response.id, []).append(response)
            if is_final(response):
                waiting.remove(response.id)

    def text(self, request_id: str, index: int = 0) -> str:
        """All text of a request."""
        parts = [outputs(each) for each in self.answers[request_id] if each.outputs]
        return "".join(each["text_output"][index] for each in parts)


@contextlib.asynccontextmanager
async def kserve(address: str, *metadata: tuple[str, str]) -> AsyncIterator[tuple[Any, Stream]]:
    """A stub, and an open stream; it is cancelled at the end."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(metadata=metadata)
        yield stub, Stream(call)
        call.cancel()
