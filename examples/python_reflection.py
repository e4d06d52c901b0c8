"""Call Cadenza with what the server says of itself: no stubs, no proto files.

    python examples/python_reflection.py --target 127.0.0.1:50051 "What is 27 + 48?"

Messages are made from the descriptors that gRPC reflection gives; so does a tool that knows many services. Needs grpcio
and `grpcio-reflection`; `rpc_status` and `error_details_pb2` come with grpcio-status.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status


class Reflected:
    """The methods of one service, found by reflection; requests are dictionaries as in protobuf's JSON."""

    def __init__(self, channel: grpc.Channel, service: str) -> None:
        self._channel = channel
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        self._service = pool.FindServiceByName(service)

    def method_names(self) -> list[str]:
        return [method.name for method in self._service.methods]

    def call(self, name: str, request: dict[str, Any], timeout_s: float | None = None) -> Iterator[Any]:
        """Start a method that streams its responses; they have the fields of the server's own messages."""
        method = self._service.methods_by_name[name]
        path = f"/{self._service.full_name}/{name}"
        message = json_format.ParseDict(request, message_factory.GetMessageClass(method.input_type)())
        read: Callable[[bytes], Any] = message_factory.GetMessageClass(method.output_type).FromString
        serialize: Callable[[Any], bytes] = type(message).SerializeToString
        responses: Iterator[Any] = self._channel.unary_stream(path, serialize, read)(message, timeout=timeout_s)
        return responses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:50051", help="HOST:PORT of a running server")
    parser.add_argument("prompt", nargs="?", default="What is 27 + 48?")
    options = parser.parse_args()
    prompt = [{"chat": {"messages": [{"role": "user", "content": options.prompt}]}}]
    with grpc.insecure_channel(options.target) as channel:
        print(*sorted(ProtoReflectionDescriptorDatabase(channel).get_services()))
        service = Reflected(channel, "cadenza.v1.GenerationService")
        print(*service.method_names())

        greedy = {"temperature": 0, "maxTokens": 64}
        for response in service.call("Generate", {"prompt": prompt, "samplingParams": greedy}):
            print("".join(output.text for output in response.outputs), end="", flush=True)
        print()

        try:
            list(service.call("Generate", {"prompt": prompt, "samplingParams": {"topP": 2}}))
        except grpc.RpcError as error:
            bad_request = error_details_pb2.BadRequest()
            if any(detail.Unpack(bad_request) for detail in rpc_status.from_call(error).details):
                for violation in bad_request.field_violations:
                    print(f"[{error.code().name}] {violation.field}: {violation.description}")

        endless = {"prompt": prompt, "samplingParams": {"maxTokens": 1000, "ignoreEos": True}}
        try:
            list(service.call("Generate", endless, timeout_s=0.05))
        except grpc.RpcError as error:
            print(f"[deadline] {error.code().name}")


if __name__ == "__main__":
    main()
