"""Chat templates in the styles of well-known models, and chats that use all that they know of."""

from __future__ import annotations

from typing import Any

LLAMA = """
{{- bos_token }}
{%- if date_string is not defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- if messages[0].role == "system" %}
    {%- set system, turns = messages[0]["content"] | trim, messages[1:] %}
{%- else %}
    {%- set system, turns = "", messages %}
{%- endif %}
{{- "<|system|>\n\n" }}
{%- if tools is not none %}{{ "Environment: ipython\n" }}{% endif %}
{{- "Today: " + date_string + "\n" + system + "<|eot|>" }}
{%- if tools is not none and tools_in_user_message | default(true) %}
    {%- set first, turns = turns[0]["content"] | trim, turns[1:] %}
    {{- "<|user|>\n\nAnswer with a call of one of these functions.\n\n" }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) + "\n\n" }}{% endfor %}
    {{- first + "<|eot|>" }}
{%- endif %}
{%- for message in turns %}
    {%- if "tool_calls" in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {%- if call.name in builtin_tools | default([]) %}
            {{- "<|assistant|>\n\n<|python_tag|>" + call.name + ".call(" }}
            {%- for name, value in call.arguments | items %}
                {{- name + '="' + value + '"' }}{% if not loop.last %}{{ ", " }}{% endif %}
            {%- endfor %}
            {{- ")<|eom|>" }}
        {%- else %}
            {{- '<|assistant|>\n\n{"name": "' + call.name + '", "parameters": ' }}
            {{- call.arguments | tojson + "}<|eot|>" }}
        {%- endif %}
    {%- elif message.role == "tool" %}
        {{- "<|ipython|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- else %}
        {{- "<|" + message["role"] + "|>\n\n" + message["content"] | trim + "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|assistant|>\n\n" }}{% endif %}
"""

HERMES = """
{%- if tools %}
    {{- "<|im_start|>system\n" }}
    {%- if messages[0].role == "system" %}{{ messages[0].content + "\n\n" }}{% endif %}
    {{- "# Tools\n<tools>" }}
    {%- for tool in tools %}{{ "\n" + tool | tojson }}{% endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == "system" %}
    {{- "<|im_start|>system\n" + messages[0].content + "<|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first)
           or (message.role == "assistant" and not message.tool_calls) %}
        {{- "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
    {%- elif message.role == "assistant" %}
        {{- "<|im_start|>assistant" }}
        {%- if message.content %}{{ "\n" + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{% set call = call.function %}{% endif %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson }}
            {{- "}\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\n" }}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}{{ "<|im_start|>user" }}{% endif %}
        {{- "\n<tool_response>\n" + message.content + "\n</tool_response>" }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ "<|im_end|>\n" }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
"""

QWEN_THINKING = """
{%- set ns = namespace(last=messages | length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if ns.open and message.role == "user" %}{% set ns.open = false %}{% set ns.last = index %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\n" }}
    {%- if message.reasoning_content is string and loop.index0 > ns.last %}
        {{- "<think>\n" + message.reasoning_content.strip("\n") + "\n</think>\n\n" }}
    {%- endif %}
    {{- (message.content or "").lstrip("\n") }}
    {%- for call in message.tool_calls or [] %}
        {{- "\n<tool_call>" }}
        {%- for name, value in call.function.arguments.items() %}
            {{- "\n<" + name + ">" + (value if value is string else value | tojson) }}
        {%- endfor %}
        {{- "\n</tool_call>" }}
    {%- endfor %}
    {{- "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ "<think>\n\n</think>\n\n" }}{% endif %}
{%- endif %}
"""

MISTRAL = """
{%- set users = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and message == users[-1] %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != "return" %}
                    {{- '"' + key + '": ' + value | tojson }}{% if not loop.last %}{{ ", " }}{% endif %}
                {%- endfor %}
                {{- "}}" }}{% if not loop.last %}{{ ", " }}{% endif %}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception("ids of calls have length 9") }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{ ", " }}{% endif %}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}
        {%- generation %}{{ " " + message["content"] | trim + eos_token }}{% endgeneration %}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id }}
        {{- '", "name": "' + message.name | default("") + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {%- continue %}
    {%- endif %}
{%- endfor %}
"""

TEMPLATES = {"llama": LLAMA, "hermes": HERMES, "qwen-thinking": QWEN_THINKING, "mistral": MISTRAL}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather <now> & 'here', été 天气",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
TOOLS: list[dict[str, Any]] = [WEATHER, TIME]


def call(name: str = "get_weather", identity: str = "abcdefgh1", **arguments: Any) -> dict[str, Any]:
    """A call of a function, its arguments an object, as templates want it."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = {"role": "system", "content": " You help. "}
USER = {"role": "user", "content": "Weather in 北京?"}
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [call(city="北京", days=2, exact=True, near=[1.5, None])],
}
RESULT = {"role": "tool", "content": '{"t": "21 °C"}', "tool_call_id": "abcdefgh1", "name": "get_weather"}
ANSWER = {"role": "assistant", "content": " It is 21 °C. "}
THOUGHT = {"role": "assistant", "content": "\nYes.", "reasoning_content": "\nShort <b>question</b>\n"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [SYSTEM, USER, ANSWER, USER],
    "called": [SYSTEM, USER, CALLING],
    "answered": [USER, CALLING, RESULT, ANSWER, USER],
    "thought": [USER, THOUGHT],
    "thought before": [USER, THOUGHT, USER],
    "talks and calls": [USER, CALLING | {"content": "I look."}, RESULT],
}
