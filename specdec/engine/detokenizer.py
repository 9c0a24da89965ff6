"""Incremental text of one request: token by token, with stop strings found inside a block of accepted tokens.

Owns: UTF-8 that is split over tokens, and text held back while a stop string may still complete.
Must not know: requests, finish reasons, counters. Read next: engine/output_processor.py.
"""

from __future__ import annotations

from tokenizers.decoders import DecodeStream

from specdec.engine.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what a decoder prints for bytes that are not (yet) a character


class Detokenizer:
    """Text of a growing token list. `feed` returns what became decodable, `flush` the rest.

    The pieces joined equal `tokenizer.decode(all fed ids)`: the stream holds bytes of an unfinished character back,
    and `flush` prints them as the whole-list decode does.
    """

    __slots__ = ("_num_chars", "_pending", "_skip_special_tokens", "_stream", "_token_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._num_chars = 0  # characters returned so far
        self._pending = False  # the stream kept bytes of the newest token back

    def feed(self, token_id: int) -> str:
        """Add one token and return the characters it completes ("" while a character is unfinished)."""
        self._token_ids.append(token_id)
        piece = self._step(token_id)
        self._pending = not piece
        self._num_chars += len(piece)
        return piece

    def flush(self) -> str:
        """Return what is still held: unfinished bytes, printed as the decoder prints them at the end of a text."""
        if not self._pending:
            return ""
        self._pending = False
        tail = self._decode_all()[self._num_chars :]
        self._num_chars += len(tail)
        return tail

    def _step(self, token_id: int) -> str:
        if self._stream is not None:
            try:
                return self._stream.step(self._tokenizer.backend, token_id) or ""
            except Exception:  # the library raises a bare Exception where a decoder rewrites text it already gave out
                self._stream = None
        text = self._decode_all()
        return "" if text.endswith(REPLACEMENT) else text[self._num_chars :]

    def _decode_all(self) -> str:
        return self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)


class StopStrings:
    """Finds the first stop string in a stream of text pieces, also one that spans pieces.

    Text that is a proper prefix of a stop string is held back, unless the stop string itself is to be shown.
    Of two stop strings that one piece completes, the one that ends first wins; on a tie the longer one.
    """

    __slots__ = ("_include", "_num_shown", "_stops", "_window")

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._window = ""  # newest text that may be the start of a stop string
        self._num_shown = 0  # characters at the front of the window that were already shown

    def feed(self, piece: str, *, armed: bool) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the stop string that `piece` completed, if any.

        armed False: a stop string completed by this piece does not count (min_tokens). After a match the text is final.
        """
        if not self._stops or not piece:
            return piece, None
        text = self._window + piece
        match = self._find(text) if armed else None
        if match is not None:
            start, stop = match
            cut = start + len(stop) if self._include else start
            shown = text[self._num_shown : cut]
            self._window, self._num_shown = "", 0
            return shown, stop
        num_held = self._num_held(text)
        end = len(text) if self._include else len(text) - num_held
        shown = text[self._num_shown : end]
        self._window = text[len(text) - num_held :]
        self._num_shown = num_held if self._include else 0
        return shown, None

    def flush(self) -> str:
        """Return the held text: the request ended without the stop string."""
        tail = self._window[self._num_shown :]
        self._window, self._num_shown = "", 0
        return tail

    def _find(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            # a match must end inside the new piece: earlier ones were judged when their piece came
            start = text.find(stop, max(0, len(self._window) - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _num_held(self, text: str) -> int:
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
