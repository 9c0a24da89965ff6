"""Tokenizer: text to ids and back, chat templates, and the text and bytes of single tokens.

Owns: every call into transformers' tokenizers. Must not know: requests. Read next: engine/detokenizer.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from specdec.errors import ConfigError, RequestRejected

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BackendTokenizer

    from specdec.config.engine import ResolvedConfig

Messages = Sequence[Mapping[str, Any]]


LONG_TEXT = 8192  # characters; longer texts are encoded as a batch of one, which lets go of the GIL so that streams keep running


class Tokenizer:
    """One tokenizer of a served model. Thread-safe for reading: encode and decode change no state.

    `vocab_size` counts added tokens too; the model's embedding may be larger (padding rows).
    """

    def __init__(self, hf_tokenizer: Any, *, eos_token_ids: Sequence[int] = ()) -> None:
        if not getattr(hf_tokenizer, "is_fast", False):
            raise ConfigError(
                f"tokenizer {type(hf_tokenizer).__name__} has no fast form, and text is streamed with the fast form only",
                hint="point --tokenizer at a directory with tokenizer.json",
            )
        self.hf = hf_tokenizer
        self.backend: BackendTokenizer = hf_tokenizer.backend_tokenizer
        self.backend.no_truncation()  # a prompt is never cut in silence
        self.backend.no_padding()
        self.vocab_size: int = len(hf_tokenizer)
        own = () if hf_tokenizer.eos_token_id is None else (int(hf_tokenizer.eos_token_id),)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*eos_token_ids, *own]))

    @classmethod
    def from_resolved(cls, resolved: ResolvedConfig) -> Tokenizer:
        """Load the tokenizer of a resolved configuration."""
        trust = resolved.engine.model.trust_remote_code
        return cls.from_path(resolved.tokenizer_path, eos_token_ids=resolved.eos_token_ids, trust_remote_code=trust)

    @classmethod
    def from_path(cls, path: str, *, eos_token_ids: Sequence[int] = (), trust_remote_code: bool = False) -> Tokenizer:
        """Load from a directory.

        Raises:
            ConfigError: nothing there that transformers can read.
        """
        from transformers import AutoTokenizer

        try:
            hf_tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError(
                f"tokenizer is {path!r}, but no tokenizer can be read there: {reason}",
                hint="--tokenizer takes a directory with tokenizer.json and tokenizer_config.json",
            ) from error
        return cls(hf_tokenizer, eos_token_ids=eos_token_ids)

    @cached_property
    def max_chars_per_token(self) -> int | None:
        """Most characters that one token can stand for; None where there is no such bound, as unknown characters may melt into one."""
        from tokenizers import decoders, models

        if not isinstance(self.backend.model, models.BPE) or not isinstance(self.backend.decoder, decoders.ByteLevel):
            return None
        if any(token.lstrip or token.rstrip for token in self.backend.get_added_tokens_decoder().values()):
            return None  # such a token swallows the spaces beside it
        longest = max(map(len, self.backend.get_vocab()))
        return longest if self.backend.normalizer is None else 4 * longest  # composed characters are fewer than those sent

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the ids of `text`, with the model's own opening tokens unless told otherwise."""
        # not hf.encode: that rewrites truncation settings, which fails while another thread encodes
        if len(text) > LONG_TEXT:
            return tuple(self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)
        return tuple(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the ids. Spaces are never tidied up: tidied text could not be streamed."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Return the ids of a conversation in the model's own format. `template_kwargs` reach the template by name."""
        text = self.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            template_kwargs=template_kwargs,
        )
        return self.encode(text, add_special_tokens=False)  # a template writes its special tokens itself

    def render_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as the prompt text of the model.

        Raises:
            RequestRejected: the model has no template, or the template refuses these messages.
        """
        if chat_template is None and not self.hf.chat_template:
            raise RequestRejected(
                "messages need a chat template, and this model's tokenizer has none",
                param="messages",
                hint="use /v1/completions with a plain prompt, or send chat_template",
            )
        if not messages:
            raise RequestRejected("messages is [], but must hold at least one message", param="messages")
        extra = dict(template_kwargs or {})
        reserved = sorted(extra.keys() & _RESERVED_TEMPLATE_KEYS)
        if reserved:
            raise RequestRejected(
                f"chat_template_kwargs must not set {reserved[0]!r}, which has its own field", param="chat_template_kwargs"
            )
        try:
            text: str = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **extra,
            )
        except Exception as error:  # all of it is about the messages, but only what the template's author wrote is for a client to read
            raise RequestRejected(
                f"messages do not fit the model's chat template{_said_by_template(error)}",
                param="messages",
                hint="send roles and texts that it knows, or a rendered prompt to /v1/completions",
            ) from error
        return text

    @property
    def chat_template(self) -> str:
        """The model's chat template, all of them joined where it has several, "" where it has none."""
        template = self.hf.chat_template
        return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template or "")

    def is_special(self, text: str) -> bool:
        """True when `text` is one special token, which decoding leaves out unless told otherwise."""
        return any(token.special and token.content == text for token in self.backend.get_added_tokens_decoder().values())

    def token_text(self, token_id: int) -> str:
        """Return one token as text; bytes that are no whole character print as U+FFFD."""
        return self.decode((token_id,), skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes one token stands for, also where they are only part of a character."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_token_ids:
            return token.encode()
        if self._is_byte_level and all(char in _BYTE_OF_CHAR for char in token):
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):  # byte fallback of sentencepiece vocabularies
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()

    @cached_property
    def _added_token_ids(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in repr(self.backend.decoder)


_RESERVED_TEMPLATE_KEYS = frozenset(
    {"messages", "conversation", "tools", "add_generation_prompt", "chat_template", "tokenize", "return_dict"}
)


def _said_by_template(error: Exception) -> str:
    """A template speaks through raise_exception, which is jinja's plainest error; everything else tells of its own code."""
    from jinja2.exceptions import TemplateError

    return f": {error}" if type(error) is TemplateError else ""


def _byte_of_char() -> dict[str, int]:
    """Byte-level vocabularies print each byte as one visible character: printable Latin-1 as itself, others from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    table = {chr(byte): byte for byte in visible}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return table


_BYTE_OF_CHAR = _byte_of_char()
