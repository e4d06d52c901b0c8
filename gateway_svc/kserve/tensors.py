"""Tensors of KServe's protocol, as far as the model has them: texts, booleans and numbers, in both of their forms."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from gateway_svc.dialects import inference_pb2 as pb
from gateway_svc.http.errors import ApiError, bad_request

_LENGTH = struct.Struct("<I")
_FORMATS = {"FP32": "f", "UINT32": "I", "BOOL": "?"}
_MAX_DIMENSIONS = 8


def read_inputs(request: pb.ModelInferRequest, kinds: Mapping[str, str]) -> dict[str, bytes | bool]:
    """The value of each input; kinds: the data type of each that may be given. Raises ApiError.

    Looks at no more than one value of each, whatever a message has.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise bad_request(f"there are {len(raw)} raw_input_contents for {len(request.inputs)} inputs")
    values: dict[str, bytes | bool] = {}
    for index, tensor in enumerate(request.inputs):
        name = tensor.name
        if name not in kinds:
            raise bad_request(f"there is no input {name[:64]!a}: there are {', '.join(kinds)}")
        if name in values:
            raise bad_request(f"input {name} is given twice")
        if tensor.datatype != kinds[name]:
            raise bad_request(f"input {name} must be {kinds[name]}, not {tensor.datatype[:16]!a}")
        if len(tensor.shape) > _MAX_DIMENSIONS or any(length != 1 for length in tensor.shape):
            raise bad_request(f"input {name} must have the shape [1], not {list(tensor.shape[:_MAX_DIMENSIONS])}")
        read = _read_text if kinds[name] == "BYTES" else _read_boolean
        values[name] = read(tensor, raw[index] if raw else None)
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


def _read_text(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> bytes:
    if raw is None:
        given = tensor.contents.bytes_contents
        if len(given) != 1:
            raise _wrong_number(tensor.name, len(given))
        return given[0]
    end = _LENGTH.size
    if len(raw) >= end:
        end += _LENGTH.unpack_from(raw)[0]
    if len(raw) < end:
        raise bad_request(f"input {tensor.name}: a text ends after its contents")
    if len(raw) > end:
        raise bad_request(f"input {tensor.name} must have one value, and has more bytes than its first")
    return raw[_LENGTH.size :]


def _read_boolean(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> bool:
    given = tensor.contents.bool_contents if raw is None else raw
    if len(given) != 1:
        raise _wrong_number(tensor.name, len(given))
    return given[0] != 0


def _wrong_number(name: str, count: int) -> ApiError:
    return bad_request(f"input {name} must have one value, not {count}")
