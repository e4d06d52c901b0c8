"""Reads calls with the parsers of vLLM's package: one job a line, one answer a line. Nothing of it is compiled."""

import contextlib
import json
import sys


class Vocabulary:
    """A tokenizer of the pieces that come: a piece is a token."""

    bos_token_id = eos_token_id = 0
    is_fast = True

    def __init__(self, pieces):
        texts = ["", *dict.fromkeys(pieces)]
        self._ids = {text: index for index, text in enumerate(texts)}
        self._texts = texts
        self.all_special_tokens = self.all_special_ids = []

    def get_vocab(self):
        """Ids by text."""
        return self._ids

    def encode(self, text, **_):
        """The id of a piece; of other text none."""
        return [self._ids[text]] if text in self._ids else []

    def decode(self, ids, **_):
        """The text of ids, or of one."""
        return "".join(self._texts[each] for each in ([ids] if isinstance(ids, int) else ids))

    def convert_tokens_to_ids(self, tokens):
        """The id of one token, or those of several."""
        return self._ids.get(tokens) if isinstance(tokens, str) else [self._ids.get(each) for each in tokens]

    def convert_ids_to_tokens(self, ids, **_):
        """The texts of ids."""
        return [self._texts[each] for each in ids]


def answer(job):
    """The calls of a text, whole and in its pieces."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], model="m", tools=job["tools"])
    vocabulary = Vocabulary([*job["pieces"], *job["markers"]])

    def parser():
        return ToolParserManager.get_tool_parser(job["parser"])(vocabulary, request.tools)

    whole = [
        (call.function.name, call.function.arguments)
        for call in parser().extract_tool_calls("".join(job["pieces"]), request).tool_calls
    ]
    streaming, streamed, text, ids, deltas = parser(), {}, "", [], []
    for piece in job["pieces"]:
        new = vocabulary.encode(piece)
        deltas.append(streaming.extract_tool_calls_streaming(text, text + piece, piece, ids, ids + new, new, request))
        text, ids = text + piece, ids + new
    if hasattr(streaming, "finish_streaming"):
        deltas.append(streaming.finish_streaming())
    for call in [call for delta in deltas if delta is not None for call in delta.tool_calls]:
        name, arguments = streamed.get(call.index, ("", ""))
        streamed[call.index] = name + (call.function.name or ""), arguments + (call.function.arguments or "")
    return {"whole": whole, "streamed": [*streamed.values()]}


for line in sys.stdin:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = answer(json.loads(line))
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))
