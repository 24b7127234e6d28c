"""A tokenizer for a tiny random model, so that people can talk to it: one token a character."""

from __future__ import annotations

import string
from pathlib import Path

CHARACTERS = string.ascii_letters + string.digits + " .,:;!?"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def add_tokenizer(directory: Path, vocab_size: int) -> Path:
    """Beside the model in `directory`. Every id below `vocab_size` is a token, so whatever it says is text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *CHARACTERS]
    words += [f"<{i}>" for i in range(len(words), vocab_size)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    named = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **named)
    whole.save_pretrained(directory)
    return directory


def ids_of(text: str) -> list[int]:
    return [len(SPECIAL) + CHARACTERS.index(character) for character in text]


def word_of(token: int) -> str:
    """What a token adds to a text."""
    known = [*("" for _ in SPECIAL), *CHARACTERS]
    return known[token] if token < len(known) else f"<{token}>"
