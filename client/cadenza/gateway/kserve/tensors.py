"""Tensors of KServe's protocol, as far as the model has them: texts, booleans and numbers, in both of their forms."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod

from cadenza.dialects import inference_pb2 as pb
from cadenza.gateway.http.errors import ApiError, bad_request

_LENGTH = struct.Struct("<I")
_FORMATS = {"FP32": "f", "UINT32": "I", "BOOL": "?"}


def read_inputs(request: pb.ModelInferRequest, kinds: dict[str, str]) -> dict[str, list[bytes] | list[bool]]:
    """The values of each input; kinds: the data type of each that may be given. Raises ApiError."""
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise bad_request(f"there are {len(raw)} raw_input_contents for {len(request.inputs)} inputs")
    values: dict[str, list[bytes] | list[bool]] = {}
    for index, tensor in enumerate(request.inputs):
        name = tensor.name
        if name not in kinds:
            raise bad_request(f"there is no input {name[:64]!a}: there are {', '.join(kinds)}")
        if name in values:
            raise bad_request(f"input {name} is given twice")
        if tensor.datatype != kinds[name]:
            raise bad_request(f"input {name} must be {kinds[name]}, not {tensor.datatype[:16]!a}")
        read = _read_texts if kinds[name] == "BYTES" else _read_booleans
        values[name] = read(tensor, raw[index] if raw else None)
        if len(values[name]) != prod(tensor.shape):
            shape = list(tensor.shape)[:4]
            raise bad_request(f"input {name} has {len(values[name])} values, which its shape {shape} does not say")
    return values


def output(
    name: str, values: Sequence[bytes] | Sequence[float], kind: str
) -> tuple[pb.ModelInferResponse.InferOutputTensor, bytes]:
    """A tensor of one dimension, and its raw contents."""
    tensor = pb.ModelInferResponse.InferOutputTensor(name=name, datatype=kind, shape=[len(values)])
    if kind == "BYTES":
        texts = [each for each in values if isinstance(each, bytes)]
        return tensor, b"".join(_LENGTH.pack(len(each)) + each for each in texts)
    return tensor, struct.pack(f"<{len(values)}{_FORMATS[kind]}", *values)


def _read_texts(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> list[bytes]:
    if raw is None:
        return list(tensor.contents.bytes_contents)
    texts, at = [], 0
    while at < len(raw):
        if at + 4 > len(raw):
            raise _cut(tensor.name)
        (length,) = _LENGTH.unpack_from(raw, at)
        at += 4
        if at + length > len(raw):
            raise _cut(tensor.name)
        texts.append(raw[at : at + length])
        at += length
    return texts


def _read_booleans(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> list[bool]:
    return list(tensor.contents.bool_contents) if raw is None else [each != 0 for each in raw]


def _cut(name: str) -> ApiError:
    return bad_request(f"input {name}: a text ends after its contents")
