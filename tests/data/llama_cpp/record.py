"""Records llama.cpp's greedy tokens of PROMPTS, and how far each was ahead, as NAME.json beside this file.

It needs xllamacpp, a package with a built llama.cpp, in an environment of its own. NAME-f32.json is of the same weights
dequantized, where llama.cpp does not round activations to 8 bits:

    python -m venv /tmp/llamacpp && /tmp/llamacpp/bin/pip install xllamacpp==2026.10.11549 gguf
    /tmp/llamacpp/bin/python tests/data/llama_cpp/record.py smollm2 SmolLM2-135M-Instruct.Q4_1.gguf
    /tmp/llamacpp/bin/python tests/data/llama_cpp/record.py gemma3 gemma-3-270m-q4_k_m.gguf
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import xllamacpp

PROMPTS = (
    "The capital of France is", "Once upon a time there was", "def fibonacci(n):", "Water boils at",
    "In 1969, the first man on the moon", "The three primary colours are", "My favourite recipe for bread:",
    "To be or not to be,", "Dear Sir or Madam,", "1, 1, 2, 3, 5, 8,", "The largest planet of the solar system",
    "import numpy as np\n", "Q: What is 7 times 8?\nA:", "<html>\n<head>\n", "Die Hauptstadt von Deutschland ist",
    "El perro corre por", "{\"name\": \"Ada\", \"age\":", "Monday, Tuesday, Wednesday,", "SELECT name FROM users WHERE",
    "The opposite of hot is",
)  # fmt: skip
NEW_TOKENS = 24


def record(path: str) -> list[dict[str, Any]]:
    """Return for each prompt its ids, llama.cpp's greedy ids, and by which probability each was ahead of the second."""
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 2048, 1, 1
    server = xllamacpp.Server(params)

    def post(route: str, **body: Any) -> Any:
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(server.listening_address + route, data, kind)) as answer:
            return json.load(answer)

    found = []
    for prompt in PROMPTS:
        asked = {"n_predict": NEW_TOKENS, "temperature": 0, "n_probs": 2, "cache_prompt": False}
        places = post("/completion", prompt=prompt, **asked)["completion_probabilities"]
        best = [[math.exp(each["logprob"]) for each in place["top_logprobs"]] for place in places]
        found.append(
            {
                "prompt": post("/tokenize", content=prompt, add_special=True)["tokens"],
                "answer": [place["id"] for place in places],
                "ahead": [round(first - second, 3) for first, second in best],
            }
        )
    return found


def dequantize(path: str, out: Path) -> None:
    """Write a GGUF file with the same weights in float32."""
    read = gguf.GGUFReader(path)
    write = gguf.GGUFWriter(out, read.fields["general.architecture"].contents())
    left_out = ("general.architecture", "general.file_type", "general.quantization_version")
    for field in read.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in left_out:
            kinds = {"sub_type": field.types[-1]} if field.types[0] == gguf.GGUFValueType.ARRAY else {}
            write.add_key_value(field.name, field.contents(), field.types[0], **kinds)
    for tensor in read.tensors:
        write.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32"))
    write.write_header_to_file()
    write.write_kv_data_to_file()
    write.write_tensors_to_file()
    write.close()


def save(name: str, path: str) -> None:
    """Record one file."""
    lines = ",\n".join(json.dumps(each) for each in record(path))
    (Path(__file__).parent / f"{name}.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    save(sys.argv[1], sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        dequantize(sys.argv[2], Path(folder) / "f32.gguf")
        save(f"{sys.argv[1]}-f32", f"{folder}/f32.gguf")
