"""Reads calls with the parsers of SGLang's package, without the rest of it: one job a line, one answer a line.

Of the package only the modules of parsers are loaded, under their own names: its own start loads torch and kernels.
"""

import contextlib
import importlib
import importlib.metadata
import json
import sys
import types

FOLDERS = ("", "srt", "srt.function_call", "srt.entrypoints", "srt.entrypoints.openai", "srt.parser")


def load():
    """The package's folders as packages without their own code."""
    root = importlib.metadata.distribution("sglang").locate_file("sglang")
    for name in FOLDERS:
        module = types.ModuleType(f"sglang.{name}".rstrip("."))
        module.__path__ = [str(root.joinpath(*filter(None, name.split("."))))]
        sys.modules[module.__name__] = module
    utils = types.ModuleType("sglang.utils")
    utils.convert_json_schema_to_str = json.dumps
    sys.modules["sglang.utils"] = utils


def answer(job):
    """The calls of a text, whole and in its pieces."""
    protocol = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
    parser = getattr(importlib.import_module(f"sglang.srt.function_call.{job['module']}"), job["parser"])
    tools = [protocol.Tool(**each) for each in job["tools"]]
    whole = parser().detect_and_parse("".join(job["pieces"]), tools).calls
    streaming, streamed = parser(), {}
    for piece in job["pieces"]:
        for call in streaming.parse_streaming_increment(piece, tools).calls:
            name, arguments = streamed.get(call.tool_index, ("", ""))
            streamed[call.tool_index] = name + (call.name or ""), arguments + (call.parameters or "")
    return {"whole": [(call.name, call.parameters) for call in whole], "streamed": [*streamed.values()]}


load()
for line in sys.stdin:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = answer(json.loads(line))
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))
