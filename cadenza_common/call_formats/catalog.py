"""The formats of tool calls: a new one is a row here. Names are vLLM's where it has them."""

from __future__ import annotations

from dataclasses import replace

from cadenza_common.call_formats.syntax import Body, CallSyntax, Tags, ToolSyntax

_QWEN_TAGS = Tags("<parameter=", ">\n", "\n</parameter>", end="</function>", is_padded=True)
_QWEN = CallSyntax(
    Body.TAGS,
    call=("<tool_call>\n<function=", "\n</tool_call>"),
    separator=">\n",
    between="\n",
    tags=_QWEN_TAGS,
    markers=("<tool_call>", "</tool_call>"),
    bare="<function=",
)
_OBJECTS = CallSyntax(
    Body.OBJECT, call=("<tool_call>\n", "\n</tool_call>"), between="\n", markers=("<tool_call>", "</tool_call>")
)
_MISTRAL = CallSyntax(Body.JSON, call=("[TOOL_CALLS]", ""), separator="[ARGS]", markers=("[TOOL_CALLS]", "[ARGS]"))


def _list(opening: str, closing: str, *, space: str = "", id_form: str = "", **others: object) -> CallSyntax:
    """A list of objects between two markers."""
    markers = tuple(text for text in (opening, closing) if text)
    way = CallSyntax(
        Body.OBJECT,
        section=(f"{opening}{space}[", f"]{closing}"),
        between=", ",
        markers=markers,
        id_form=id_form,
    )
    return replace(way, **others)  # type: ignore[arg-type]


def _deepseek(separator: str, closing: str, opening: str = "") -> CallSyntax:
    return CallSyntax(
        Body.JSON,
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call=(f"<｜tool▁call▁begin｜>{opening}", f"{closing}<｜tool▁call▁end｜>"),
        separator=separator,
        between="\n" if closing else "",
        markers=(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
    )


def _dsml(section: str) -> CallSyntax:
    tags = Tags(
        '<｜DSML｜parameter name="',
        '" string="{type}">',
        "</｜DSML｜parameter>",
        end="</｜DSML｜invoke>",
        types=("true", "false"),
    )
    return CallSyntax(
        Body.TAGS,
        section=(f"<｜DSML｜{section}>\n", f"\n</｜DSML｜{section}>"),
        call=('<｜DSML｜invoke name="', ""),
        separator='">\n',
        between="\n",
        tags=tags,
        markers=("｜DSML｜",),
    )


def _glm(line: str, key_close: str = "", suffix: str = "") -> CallSyntax:
    """Keys and values between tags; line: what breaks lines."""
    names = ("tool_call", "arg_key", "arg_value")
    opening = {name: f"<{name}{suffix}>" for name in names}
    closing = {name: f"</{name}{suffix}>" for name in names}
    tags = Tags(
        opening["arg_key"],
        f"{closing['arg_key']}{key_close}{opening['arg_value']}",
        closing["arg_value"],
        behind=line,
    )
    return CallSyntax(
        Body.TAGS,
        call=(opening["tool_call"], closing["tool_call"]),
        separator=line,
        between=line,
        tags=tags,
        markers=(*(text for name in names for text in (opening[name], closing[name])),),
    )


def _harmony(head: str, separator: str) -> CallSyntax:
    return CallSyntax(
        Body.JSON,
        call=(head, "<|call|>"),
        separator=separator,
        markers=("<|channel|>", "<|message|>", "<|call|>", "<|start|>", "<|constrain|>", "<|end|>", "<|return|>"),
        name=r"[\w./-]+",
    )


def _muse(head: str) -> CallSyntax:
    return CallSyntax(
        Body.TAGS,
        section=(f"{head}<atem:function_calls>\n", "\n</atem:function_calls>"),
        call=('<atem:invoke name="', ""),
        separator='">\n',
        between="\n",
        tags=Tags('<atem:parameter name="', '">', "</atem:parameter>", end="</atem:invoke>"),
        markers=("<atem:function_calls>", "</atem:function_calls>", *(("<|message|>",) if head else ())),
    )


_HY_TOKENS = ":opensource"
_HUNYUAN = replace(
    _glm("\n", "\n", _HY_TOKENS),
    section=(f"<tool_calls{_HY_TOKENS}>\n", f"\n</tool_calls{_HY_TOKENS}>"),
    separator=f"<tool_sep{_HY_TOKENS}>\n",
    markers=(
        f"<tool_calls{_HY_TOKENS}>",
        f"</tool_calls{_HY_TOKENS}>",
        f"<tool_sep{_HY_TOKENS}>",
        *_glm("\n", "\n", _HY_TOKENS).markers,
    ),
)

FORMATS: tuple[ToolSyntax, ...] = (
    ToolSyntax("hermes", "Hermes, Qwen 2.5 and 3, Granite 4, SmolLM3, Bielik, MiMo, Reka", (_OBJECTS,)),
    ToolSyntax("qwen3_coder", "Qwen3-Coder, Qwen 3.5, Nemotron 3 Nano, Step 3.5", (_QWEN,)),
    ToolSyntax(
        "seed_oss",
        "Seed-OSS",
        (
            replace(
                _QWEN,
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
            _MISTRAL,
            replace(
                _MISTRAL,
                separator="[CALL_ID]{id}[ARGS]",
                markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
                id_form="abcdefgh{index}",
            ),
            _list("[TOOL_CALLS]", ""),
            replace(_MISTRAL, separator="", markers=("[TOOL_CALLS]",)),
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
        ),
        hint="List of tools: ",
    ),
    ToolSyntax("glm45", "GLM 4.5 to 4.7, Ling 3, Spark 2.5, Laguna", (_glm("\n", "\n"), _glm(""), _glm("\n"))),
    ToolSyntax(
        "deepseek_v3",
        "DeepSeek R1, V3",
        (_deepseek("\n```json\n", "\n```", "function<｜tool▁sep｜>"),),
    ),
    ToolSyntax("deepseek_v31", "DeepSeek V3.1", (_deepseek("<｜tool▁sep｜>", ""),)),
    ToolSyntax("deepseek_v32", "DeepSeek V3.2, V4", (_dsml("function_calls"), _dsml("tool_calls"))),
    ToolSyntax(
        "kimi_k2",
        "Kimi K2",
        (
            CallSyntax(
                Body.JSON,
                section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
                call=("<|tool_call_begin|>functions.", "<|tool_call_end|>"),
                separator=":{index}<|tool_call_argument_begin|>",
                name=r"[\w./-]+",
                markers=(
                    "<|tool_calls_section_begin|>",
                    "<|tool_calls_section_end|>",
                    "<|tool_call_begin|>",
                    "<|tool_call_end|>",
                    "<|tool_call_argument_begin|>",
                ),
            ),
        ),
    ),
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
            _harmony("<|start|>assistant to=functions.", "<|channel|>commentary json<|message|>"),
            _harmony("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
            _harmony("<|channel|>commentary to=functions.", " json<|message|>"),
            _harmony("<|channel|>commentary to=functions.", "<|message|>"),
            _harmony("<|start|>assistant to=functions.", "<|channel|>commentary <|constrain|>json<|message|>"),
            replace(_harmony(" to=functions.", "<|channel|>commentary json<|message|>"), is_known=True),
            replace(_harmony(" to=functions.", "<|channel|>commentary <|constrain|>json<|message|>"), is_known=True),
        ),
        written=1,
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
        (_list("<|tool_call|>", ""), _list("<tool_call>", "")),
        hint="<|tool_call|> followed by a JSON list",
    ),
    ToolSyntax("phi4_mini_json", "phi-4", (_list("<|tool_call|>", "<|/tool_call|>"),)),
    ToolSyntax("firefunction", "firefunction v2, phi-4-mini", (_list("functools", "", is_known=True),)),
    ToolSyntax("nemotron", "Nemotron Nano 2", (_list("<TOOLCALL>", "</TOOLCALL>"),)),
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
    ToolSyntax("apriel", "Apriel, Hunyuan A13B", (_list("<tool_calls>", "</tool_calls>", id_form="{index}"),)),
    ToolSyntax("hunyuan", "Hunyuan 3", (_HUNYUAN,)),
    ToolSyntax(
        "cohere",
        "Command R7B, Command A, Cohere 2",
        (
            replace(
                _list("<|START_ACTION|>", "<|END_ACTION|>"),
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
                _list("Action:", "```"),
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
    ToolSyntax("muse", "Muse", (_muse(" to={name}<|message|>"), _muse(""))),
)
BY_NAME = {each.name: each for each in FORMATS}
