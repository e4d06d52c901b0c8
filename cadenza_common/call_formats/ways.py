"""Ways to write calls that several formats share, or one format has in several forms."""

from __future__ import annotations

from dataclasses import replace

from cadenza_common.call_formats.syntax import Body, CallSyntax, Tags

QWEN_TAGS = Tags("<parameter=", ">\n", "\n</parameter>", end="</function>", is_padded=True)
QWEN = CallSyntax(
    Body.TAGS,
    call=("<tool_call>\n<function=", "\n</tool_call>"),
    separator=">\n",
    between="\n",
    tags=QWEN_TAGS,
    markers=("<tool_call>", "</tool_call>"),
    bare="<function=",
)
OBJECTS = CallSyntax(
    Body.OBJECT, call=("<tool_call>\n", "\n</tool_call>"), between="\n", markers=("<tool_call>", "</tool_call>")
)
MISTRAL = CallSyntax(Body.JSON, call=("[TOOL_CALLS]", ""), separator="[ARGS]", markers=("[TOOL_CALLS]", "[ARGS]"))

KIMI = CallSyntax(
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
)


def list_way(opening: str, closing: str, *, space: str = "", id_form: str = "", **others: object) -> CallSyntax:
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


def deepseek_way(separator: str, closing: str, opening: str = "") -> CallSyntax:
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


def dsml_way(section: str) -> CallSyntax:
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


def glm_way(line: str, key_close: str = "", suffix: str = "") -> CallSyntax:
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


def harmony_way(head: str, separator: str) -> CallSyntax:
    return CallSyntax(
        Body.JSON,
        call=(head, "<|call|>"),
        separator=separator,
        header=r"[^{\n]{0,64}",
        markers=("<|channel|>", "<|message|>", "<|call|>", "<|start|>", "<|constrain|>", "<|end|>", "<|return|>"),
        name=r"[\w./-]+",
    )


def muse_way(head: str) -> CallSyntax:
    return CallSyntax(
        Body.TAGS,
        section=(f"{head}<atem:function_calls>\n", "\n</atem:function_calls>"),
        call=('<atem:invoke name="', ""),
        separator='">\n',
        between="\n",
        tags=Tags('<atem:parameter name="', '">', "</atem:parameter>", end="</atem:invoke>"),
        markers=("<atem:function_calls>", "</atem:function_calls>", *(("<|message|>",) if head else ())),
    )


HY_TOKENS = ":opensource"
HUNYUAN = replace(
    glm_way("\n", "\n", HY_TOKENS),
    section=(f"<tool_calls{HY_TOKENS}>\n", f"\n</tool_calls{HY_TOKENS}>"),
    separator=f"<tool_sep{HY_TOKENS}>\n",
    markers=(
        f"<tool_calls{HY_TOKENS}>",
        f"</tool_calls{HY_TOKENS}>",
        f"<tool_sep{HY_TOKENS}>",
        *glm_way("\n", "\n", HY_TOKENS).markers,
    ),
)
