"""Small tokenizers, made in memory in milliseconds: byte-level BPE, sentencepiece's Unigram and byte fallback."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from scheduler_svc.requests.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello, world! Hello there.",
    "你好，世界。今天天气很好，我们去公园散步吧。",
    "Zoë's naïve café costs 5 €; e\u0301 and o\u0308 are combined.",
    "👨‍👩‍👧‍👦 and 🏳️‍🌈 are joined; 😀😃😄 are not. 👍🏽",
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'refused' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def hf_byte_level(*, template: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE as GPT-2, Llama 3 and Qwen have it; some 400 ids, the first 3 special."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS * 5, trainer)
    inner = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=SPECIAL[0], pad_token=SPECIAL[0])
    if template:
        inner.chat_template = TEMPLATE
    return inner


@cache
def byte_level(*, template: bool = True) -> Tokenizer:
    """The same, as the service wraps it."""
    return Tokenizer(hf_byte_level(template=template), "toy-byte-level")


@cache
def unigram() -> Tokenizer:
    """Unigram with Metaspace: words carry their leading space as a mark, and decoding drops the first one."""
    raw = RawTokenizer(models.Unigram())
    raw.normalizer = normalizers.NFKC()
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    raw.train_from_iterator(CORPUS * 5, trainer)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>"), "toy-unigram")


@cache
def byte_fallback() -> Tokenizer:
    """BPE with byte fallback, as Llama 2: a run of byte tokens is spoiled while its last character is incomplete."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ["▁", "H", "i", "▁H", "▁Hi", "o", "▁o", "n", "e", "▁on", "▁one"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "H"), ("▁H", "i"), ("▁", "o"), ("▁o", "n"), ("▁on", "e")]
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>"),
        "toy-byte-fallback",
    )
