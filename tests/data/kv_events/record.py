"""Run by an interpreter that has vLLM: reads payloads with vLLM's own classes, and prints what these make of them.

    /path/of/vllm/python tests/data/kv_events/record.py '["HEX", ...]'

What it prints is what payloads.json keeps: equal bytes mean that vLLM reads each field as it writes it.
"""

import json
import sys

import msgspec
from vllm import __version__
from vllm.distributed.kv_events import KVEventBatch


def main() -> None:
    """Print a JSON object with the payloads as vLLM encodes them."""
    decoder, encoder = msgspec.msgpack.Decoder(type=KVEventBatch), msgspec.msgpack.Encoder()
    encoded = [encoder.encode(decoder.decode(bytes.fromhex(each))).hex() for each in json.loads(sys.argv[1])]
    print(json.dumps({"vllm": __version__, "payloads": encoded}))


if __name__ == "__main__":
    main()
