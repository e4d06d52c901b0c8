"""Asks a server with langchain-openai: chats whole, streamed, through responses, and completions."""

import json
import sys

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

asked = json.loads(sys.argv[1])
server = {
    "base_url": f"{asked['url']}/v1",
    "api_key": "any",
    "model": asked["model"],
    "temperature": 0,
    "max_tokens": asked["max_tokens"],
}
chat = ChatOpenAI(**server, stream_usage=True)
whole = chat.invoke(asked["question"])
chunks = list(chat.stream(asked["question"]))
by_responses = ChatOpenAI(**server, use_responses_api=True).invoke(asked["question"])
must_call = chat.bind_tools([asked["tool"]], tool_choice="any", parallel_tool_calls=False, max_tokens=120)
called = must_call.invoke(asked["question"])
streamed_calls = None
for chunk in must_call.stream(asked["question"]):
    streamed_calls = chunk if streamed_calls is None else streamed_calls + chunk
results = [ToolMessage("21", tool_call_id=call["id"]) for call in called.tool_calls]
loop = [HumanMessage(asked["question"]), called, *results]
ends = [
    ChatOpenAI(**server, use_responses_api=is_newer).bind_tools([asked["tool"]]).invoke(loop)
    for is_newer in (False, True)
]
found = {
    "num_ends": len([end for end in ends if end.usage_metadata["output_tokens"]]),
    "calls": [
        {"name": each["name"], "arguments": each["args"]} for each in (*called.tool_calls, *streamed_calls.tool_calls)
    ],
    "text": whole.content,
    "tokens": whole.usage_metadata["output_tokens"],
    "finish": whole.response_metadata["finish_reason"],
    "streamed": "".join(chunk.content for chunk in chunks),
    "streamed_tokens": sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks),
    "responses": by_responses.text if isinstance(by_responses.text, str) else by_responses.text(),
    "completion": OpenAI(**server).invoke(asked["prompt"]),
}
try:
    chat.invoke("5 " * 5000)
except ContextOverflowError:
    found["is_too_long"] = True
print(json.dumps(found))
