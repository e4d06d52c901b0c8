"""The demo model's tokenizer: byte-level BPE trained on generated text, single digits, single Chinese characters.

Byte level means that every string can be encoded; Chinese characters that the generated text lacks fall apart into
byte tokens, which is what the streaming detokenizer of the server has to cope with.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = (PAD, BOS, EOS, *ROLES.values())

# Digits, Chinese characters and the signs + - = stand alone; ", " before a digit is one piece, which keeps counting
# short; letters take the space before them along, as in GPT-2's pattern.
_PIECES = "|".join(
    (
        r"\p{N}",
        r"\p{Han}",
        r"[-+=]",
        r", (?=\p{N})",
        r"'(?:s|t|re|ve|m|ll|d)",
        r" ?[\p{L}&&[^\p{Han}]]+",
        r"[、。，！？：；《》]",
        r" ?[^-+=\s\p{L}\p{N}、。，！？：；《》]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# Every turn is "<|role|>text<|eos|>", so the end of an answer is the end of its turn in any history.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a special token; KeyError when the vocabulary lacks it."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train the BPE on `texts`; raw text encodes as BOS followed by its pieces, as Llama's tokenizer does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A {BOS}:1 $B:1",
                special_tokens=[(BOS, token_id(tokenizer, BOS))],
            ),
        ]
    )
    return tokenizer


def wrap(tokenizer: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """Return the transformers tokenizer that is saved with the model."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(ROLES.values()),
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
