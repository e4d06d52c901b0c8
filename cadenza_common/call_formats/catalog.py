"""The formats of tool calls: a new one is a row here. Names are vLLM's where it has them."""

from __future__ import annotations

from dataclasses import replace

from cadenza_common.call_formats.syntax import Body, CallSyntax, Tags, ToolSyntax
from cadenza_common.call_formats.ways import (
    HUNYUAN,
    KIMI,
    MISTRAL,
    OBJECTS,
    QWEN,
    deepseek_way,
    dsml_way,
    glm_way,
    harmony_way,
    list_way,
    muse_way,
)

FORMATS: tuple[ToolSyntax, ...] = (
    ToolSyntax("hermes", "Hermes, Qwen 2.5 and 3, Granite 4, SmolLM3, Bielik, MiMo, Reka", (OBJECTS,)),
    ToolSyntax("qwen3_coder", "Qwen3-Coder, Qwen 3.5, Nemotron 3 Nano, Step 3.5", (QWEN,)),
    ToolSyntax(
        "seed_oss",
        "Seed-OSS",
        (
            replace(
                QWEN,
                call=("<seed:tool_call>\n<function=", "\n</seed:tool_call>"),
                separator=">\n",
                tags=Tags("<parameter=", ">", "</parameter>", end="</function>"),
                markers=("<seed:tool_call>", "</seed:tool_call>"),
            ),
        ),
    ),
    ToolSyntax(
        "mistral",
        "Mistral, Ministral, Devstral",
        (
            MISTRAL,
            replace(
                MISTRAL,
                separator="[CALL_ID]{id}[ARGS]",
                markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
                id_form="abcdefgh{index}",
            ),
            list_way("[TOOL_CALLS]", ""),
            replace(MISTRAL, separator="", markers=("[TOOL_CALLS]",)),
        ),
    ),
    ToolSyntax(
        "llama3_json",
        "Llama 3.1, 3.2 and 3.3",
        (
            CallSyntax(
                Body.OBJECT,
                section=("<|python_tag|>", ""),
                between="; ",
                keys=("name", "parameters"),
                needs_arguments=True,
                markers=("<|python_tag|>",),
                is_known=True,
                bare="",
            ),
        ),
    ),
    ToolSyntax(
        "pythonic",
        "Llama 3.2 and 4, in Python's form",
        (
            CallSyntax(
                Body.PYTHON,
                section=("<|python_start|>[", "]<|python_end|>"),
                separator="(",
                between=", ",
                markers=("<|python_start|>", "<|python_end|>"),
                is_known=True,
                bare="[",
            ),
            CallSyntax(
                Body.PYTHON,
                section=("<|python_tag|>[", "]"),
                separator="(",
                between=", ",
                markers=("<|python_tag|>",),
                is_known=True,
            ),
        ),
        written=0,
    ),
    ToolSyntax(
        "lfm2",
        "LFM2, LFM2.5",
        (
            CallSyntax(
                Body.PYTHON,
                section=("<|tool_call_start|>[", "]<|tool_call_end|>"),
                separator="(",
                between=", ",
                markers=("<|tool_call_start|>", "<|tool_call_end|>"),
            ),
            list_way("<|tool_call_start|>", "<|tool_call_end|>"),
        ),
        hint="List of tools: ",
    ),
    ToolSyntax("glm45", "GLM 4.5 to 4.7, Ling 3, Spark 2.5, Laguna", (glm_way("\n", "\n"), glm_way(""), glm_way("\n"))),
    ToolSyntax(
        "deepseek_v3",
        "DeepSeek R1, V3",
        (deepseek_way("\n```json\n", "\n```", "function<｜tool▁sep｜>"),),
    ),
    ToolSyntax("deepseek_v31", "DeepSeek V3.1", (deepseek_way("<｜tool▁sep｜>", ""),)),
    ToolSyntax("deepseek_v32", "DeepSeek V3.2, V4", (dsml_way("function_calls"), dsml_way("tool_calls"))),
    ToolSyntax("kimi_k2", "Kimi K2", (KIMI, replace(KIMI, call=("<|tool_call_begin|>", "<|tool_call_end|>")))),
    ToolSyntax(
        "kimi_k3",
        "Kimi K3",
        (
            CallSyntax(
                Body.TAGS,
                section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
                call=('<|open|>call tool="', ""),
                separator='" index="{index}"<|sep|>',
                tags=Tags(
                    '<|open|>argument key="',
                    '" type="{type}"<|sep|>',
                    "<|close|>argument<|sep|>",
                    end="<|close|>call<|sep|>",
                    types=("string", ""),
                    behind="",
                ),
                markers=("<|open|>", "<|close|>", "<|sep|>"),
            ),
        ),
    ),
    ToolSyntax(
        "openai",
        "gpt-oss (harmony)",
        (
            harmony_way("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
            harmony_way("<|channel|>analysis to=functions.", " <|constrain|>json<|message|>"),
            harmony_way("<|start|>assistant to=functions.", "<|channel|>commentary json<|message|>"),
            replace(harmony_way(" to=functions.", "<|channel|>commentary json<|message|>"), is_known=True),
        ),
        written=0,
    ),
    ToolSyntax(
        "minimax",
        "MiniMax M1",
        (
            CallSyntax(
                Body.OBJECT,
                section=("<tool_calls>\n", "\n</tool_calls>"),
                between="\n",
                markers=("<tool_calls>", "</tool_calls>"),
            ),
        ),
    ),
    ToolSyntax(
        "minimax_m2",
        "MiniMax M2",
        (
            CallSyntax(
                Body.TAGS,
                section=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
                call=('<invoke name="', ""),
                separator='">\n',
                between="\n",
                tags=Tags('<parameter name="', '">', "</parameter>", end="</invoke>"),
                markers=("<minimax:tool_call>", "</minimax:tool_call>"),
            ),
        ),
    ),
    ToolSyntax(
        "minimax_m3",
        "MiniMax M3",
        (
            CallSyntax(
                Body.TREE,
                section=("]<]minimax[>[<tool_call>\n", "]<]minimax[>[</tool_call>"),
                call=(']<]minimax[>[<invoke name="', "]<]minimax[>[</invoke>\n"),
                separator='">',
                markers=("]<]minimax[>[",),
            ),
        ),
    ),
    ToolSyntax(
        "gemma4",
        "Gemma 4",
        (
            CallSyntax(
                Body.TYPED,
                call=("<|tool_call>call:", "<tool_call|>"),
                separator="{",
                markers=("<|tool_call>", "<tool_call|>", '<|"|>'),
                name=r"[\w./-]+",
            ),
        ),
    ),
    ToolSyntax(
        "granite",
        "Granite 3.3",
        (list_way("<|tool_call|>", ""), list_way("<tool_call>", "")),
        hint="<|tool_call|> followed by a JSON list",
    ),
    ToolSyntax("phi4_mini_json", "phi-4", (list_way("<|tool_call|>", "<|/tool_call|>"),)),
    ToolSyntax("firefunction", "firefunction v2, phi-4-mini", (list_way("functools", "", is_known=True),)),
    ToolSyntax("nemotron", "Nemotron Nano 2", (list_way("<TOOLCALL>", "</TOOLCALL>"),)),
    ToolSyntax(
        "apertus",
        "Apertus",
        (
            CallSyntax(
                Body.JSON,
                section=("<|tools_prefix|>[", "]<|tools_suffix|>"),
                call=('{"', "}"),
                separator='": ',
                between=", ",
                markers=("<|tools_prefix|>", "<|tools_suffix|>"),
            ),
        ),
    ),
    ToolSyntax("apriel", "Apriel, Hunyuan A13B", (list_way("<tool_calls>", "</tool_calls>", id_form="{index}"),)),
    ToolSyntax("hunyuan", "Hunyuan 3", (HUNYUAN,)),
    ToolSyntax(
        "cohere",
        "Command R7B, Command A, Cohere 2",
        (
            replace(
                list_way("<|START_ACTION|>", "<|END_ACTION|>"),
                section=("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
                between=",\n    ",
                keys=("tool_name", "parameters"),
            ),
        ),
    ),
    ToolSyntax(
        "command_r",
        "Command R and R+",
        (
            replace(
                list_way("Action:", "```"),
                section=("Action:\n```json\n[\n    ", "\n]\n```"),
                between=",\n    ",
                keys=("tool_name", "parameters"),
                markers=("Action:",),
                is_known=True,
            ),
        ),
    ),
    ToolSyntax(
        "functionary_v31",
        "functionary 3.1",
        (
            CallSyntax(
                Body.JSON,
                call=("<function=", "</function>"),
                separator=">",
                markers=("<function=", "</function>"),
                is_known=True,
            ),
        ),
    ),
    ToolSyntax(
        "functionary_v32",
        "functionary 3.2",
        (CallSyntax(Body.JSON, call=(">>>", ""), separator="\n", markers=(">>>",), is_known=True, bare=""),),
        wrappers=(">>>all\n",),
        start="all\n",
    ),
    ToolSyntax(
        "solar",
        "Solar Open",
        (
            CallSyntax(
                Body.JSON,
                section=("<|tool_calls|>", "<|calls|>"),
                call=("<|tool_call:begin|>{id}<|tool_call:name|>", "<|tool_call:end|>"),
                separator="<|tool_call:args|>",
                id_form="abcdefgh{index}",
                markers=(
                    "<|tool_calls|>",
                    "<|calls|>",
                    "<|tool_call:begin|>",
                    "<|tool_call:name|>",
                    "<|tool_call:args|>",
                    "<|tool_call:end|>",
                ),
            ),
        ),
    ),
    ToolSyntax(
        "gigachat3",
        "GigaChat 3, 3.1",
        (
            CallSyntax(Body.OBJECT, call=("<|function_call|>", ""), markers=("<|function_call|>",)),
            CallSyntax(
                Body.OBJECT,
                call=("<|message_sep|>\n\nfunction call<|role_sep|>\n", ""),
                markers=("<|message_sep|>", "<|role_sep|>"),
                bare="function call<|role_sep|>\n",
            ),
        ),
    ),
    ToolSyntax(
        "minicpm5",
        "MiniCPM 5",
        (
            CallSyntax(
                Body.TAGS,
                call=('<function name="', ""),
                separator='">',
                between="\n",
                tags=Tags('<param name="', '">', "</param>", end="</function>", quotes=("<![CDATA[", "]]>"), behind=""),
                markers=('<function name="', "</function>"),
                is_known=True,
            ),
        ),
    ),
    ToolSyntax("muse", "Muse", (muse_way(" to={name}<|message|>"), muse_way(""))),
    ToolSyntax(
        "functiongemma",
        "FunctionGemma",
        (
            CallSyntax(
                Body.TYPED,
                call=("<start_function_call>call:", "<end_function_call>"),
                separator="{",
                markers=("<start_function_call>", "<end_function_call>", "<escape>"),
                name=r"[\w./-]+",
            ),
        ),
    ),
    ToolSyntax(
        "internlm",
        "InternLM 2.5 and 3",
        (
            CallSyntax(
                Body.OBJECT,
                call=("<|action_start|><|plugin|>\n", "\n<|action_end|>"),
                keys=("name", "parameters"),
                between="\n",
                markers=("<|action_start|>", "<|action_end|>", "<|plugin|>"),
            ),
        ),
    ),
    ToolSyntax(
        "longcat",
        "LongCat",
        (
            CallSyntax(
                Body.OBJECT,
                call=("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
                between="\n",
                markers=("<longcat_tool_call>", "</longcat_tool_call>"),
            ),
        ),
    ),
    ToolSyntax(
        "olmo3",
        "OLMo 3",
        (
            CallSyntax(
                Body.PYTHON,
                section=("<function_calls>", "</function_calls>"),
                separator="(",
                between="\n",
                markers=("<function_calls>", "</function_calls>"),
            ),
        ),
    ),
)
BY_NAME = {each.name: each for each in FORMATS}
