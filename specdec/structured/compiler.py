"""GrammarCompiler: constraints to compiled grammars, on threads of its own, each once.

Owns: the time and size limits, and the cache. Must not know: requests, queues, HTTP. Read next: matcher.py.

Compiling holds no lock that a decode step needs, but it may take seconds, so it never runs on an event loop or inside a step.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specdec.errors import QueueFull, RequestRejected
from specdec.sampling_params import StructuredOutputParams
from specdec.structured.faults import GrammarFault
from specdec.structured.regex import check_regex
from specdec.structured.schema import checked_schema
from specdec.structured.vocabulary import Vocabulary

MAX_WHITESPACE = 16  # characters between two JSON tokens: room for indentation, and no endless run of blanks
NUM_THREADS = 2
_NOT_IN_JSON = frozenset(range(0x20)) - set(b"\r\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileLimits:
    """Bounds of one constraint and of all: characters of its text, seconds to compile, bytes of its tables, bytes of the cache."""

    max_characters: int = 128 * 1024
    timeout_s: float = 15.0
    max_grammar_bytes: int = 128 * 2**20
    max_cache_bytes: int = 512 * 2**20
    max_pending: int = 64


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled constraint over one vocabulary. `compiled` is the library's object: immutable, safe to share by threads."""

    compiled: Any
    vocabulary: Vocabulary

    @property
    def num_bytes(self) -> int:
        """Memory of its tables."""
        return int(self.compiled.memory_size_bytes)


class GrammarCompiler:
    """Compiles for one vocabulary, which is read when the first constraint comes. Thread-safe."""

    def __init__(self, read_vocabulary: Callable[[], Vocabulary], *, limits: CompileLimits | None = None) -> None:
        self.limits = limits or CompileLimits()
        self.num_compiled = 0
        self._read_vocabulary = read_vocabulary
        self._lock = threading.Lock()  # guards everything below
        self._cache: OrderedDict[StructuredOutputParams, Future[Grammar]] = OrderedDict()  # oldest use first; pending ones too
        self._pool: ThreadPoolExecutor | None = None

    def compile(self, params: StructuredOutputParams, *, field: str) -> Grammar:
        """Return the grammar, waiting for it.

        Raises:
            RequestRejected: the constraint is wrong or too big; `field` is its `param` and begins the message.
            QueueFull: too many constraints are being compiled.
        """
        future = self._submit(params)
        try:
            return future.result(self.limits.timeout_s)
        except GrammarFault as fault:
            raise self._rejection(fault, field) from None
        except FutureTimeout:
            raise self._rejection(self._too_slow(), field) from None

    async def compile_async(self, params: StructuredOutputParams, *, field: str) -> Grammar:
        """As `compile`, without holding up the event loop."""
        future = asyncio.wrap_future(self._submit(params))
        done, _ = await asyncio.wait({future}, timeout=self.limits.timeout_s)  # unlike wait_for, this leaves it to others who wait
        if not done:
            raise self._rejection(self._too_slow(), field)
        try:
            return future.result()
        except GrammarFault as fault:
            raise self._rejection(fault, field) from None

    def close(self) -> None:
        """Start nothing more. What runs ends by itself."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, params: StructuredOutputParams) -> Future[Grammar]:
        with self._lock:
            known = self._cache.get(params)
            if known is not None and not _has_failed(known):
                self._cache.move_to_end(params)
                return known
            num_pending = sum(not future.done() for future in self._cache.values())
            if num_pending >= self.limits.max_pending:
                raise QueueFull(f"{num_pending} schemas and grammars are being compiled already", hint="retry later")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_THREADS, "specdec-grammar")
            future = self._pool.submit(self._compile, params)
            self._cache[params] = future
            self._cache.move_to_end(params)
        future.add_done_callback(lambda _: self._evict())
        return future

    def _evict(self) -> None:
        """Forget failures, and the grammars that were not used for longest while all together are too big."""
        with self._lock:
            done = [(params, future) for params, future in self._cache.items() if future.done()]
            sizes: dict[StructuredOutputParams, int] = {}
            for params, future in done:
                if _has_failed(future):
                    del self._cache[params]
                else:
                    sizes[params] = future.result().num_bytes
            total = sum(sizes.values())
            for params, size in sizes.items():
                if total <= self.limits.max_cache_bytes:
                    break
                total -= size
                del self._cache[params]

    def _compile(self, params: StructuredOutputParams) -> Grammar:
        """Runs on a thread of the pool.

        Raises:
            GrammarFault: the constraint cannot be used.
        """
        is_json = params.json_schema is not None or params.json_object
        grammar = Grammar(self._build(params), self._json_vocabulary if is_json else self._vocabulary)
        self.num_compiled += 1
        if grammar.num_bytes > self.limits.max_grammar_bytes:
            rule = f"its tables take {grammar.num_bytes} bytes, the limit is {self.limits.max_grammar_bytes}"
            raise GrammarFault(rule, hint="simplify it")
        if not _can_begin(grammar):
            raise GrammarFault("no token of this model can begin a text that it allows", hint="check that it allows any text at all")
        return grammar

    def _build(self, params: StructuredOutputParams) -> Any:
        given = [params.json_schema, params.regex, params.choice, params.grammar]
        if sum(value is not None for value in given) + params.json_object != 1:
            raise GrammarFault("exactly one constraint must be given: a JSON schema, json_object, regex, choice or grammar")
        try:
            if params.json_schema is not None or params.json_object:
                schema = checked_schema(self._bounded('{"type": "object"}' if params.json_schema is None else params.json_schema))
                return self._json_library.compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)
            if params.regex is not None:
                check_regex(self._bounded(params.regex))
                return self._library.compile_regex(params.regex)
            if params.choice is not None:
                return self._library.compile_grammar(choice_grammar(params.choice, max_characters=self.limits.max_characters))
            return self._library.compile_grammar(self._bounded(params.grammar or ""))
        except (RuntimeError, ValueError) as error:  # the library's own refusals have no narrower type
            raise GrammarFault(_reason(error)) from None

    def _bounded(self, text: str) -> str:
        if len(text) > self.limits.max_characters:
            raise GrammarFault(f"it has {len(text)} characters, the limit is {self.limits.max_characters}", hint="shorten it")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise GrammarFault("it holds a lone surrogate, but must be Unicode text") from None
        return text

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        vocabulary = self._read_vocabulary()
        if not vocabulary.eos_token_ids:
            raise GrammarFault("this model names no end-of-sequence token, so that no answer could end where the grammar does")
        return vocabulary

    @cached_property
    def _json_vocabulary(self) -> Vocabulary:
        """For JSON, where control characters may not stand in strings: the library lets some of them into bounded ones.

        Without tokens that hold them (line breaks aside, which it handles) no text can; a tab is then no whitespace either.
        """
        token_bytes = tuple(b"" if set(token) & _NOT_IN_JSON else token for token in self._vocabulary.token_bytes)
        return Vocabulary(token_bytes, self._vocabulary.eos_token_ids)

    @cached_property
    def _library(self) -> Any:
        return _library_over(self._vocabulary)

    @cached_property
    def _json_library(self) -> Any:
        return _library_over(self._json_vocabulary)

    def _too_slow(self) -> GrammarFault:
        return GrammarFault(f"compiling it takes longer than {self.limits.timeout_s:g} s", hint="simplify it")

    def _rejection(self, fault: GrammarFault, field: str) -> RequestRejected:
        return RequestRejected(f"{field} cannot be used: {fault.reason}", param=field, hint=fault.hint)


def _library_over(vocabulary: Vocabulary) -> Any:
    import xgrammar

    info = xgrammar.TokenizerInfo(
        list(vocabulary.token_bytes), xgrammar.VocabType.RAW, vocab_size=vocabulary.size, stop_token_ids=list(vocabulary.eos_token_ids)
    )
    num_threads = max(1, min(8, (os.cpu_count() or 1) // 4))
    return xgrammar.GrammarCompiler(info, max_threads=num_threads, cache_enabled=False)  # the cache here knows its limits


def _has_failed(future: Future[Grammar]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


def choice_grammar(choices: tuple[str, ...], *, max_characters: int) -> str:
    """Return the grammar that allows exactly the given texts.

    Raises:
        GrammarFault: there are none, or they are too long together.
    """
    if not choices:
        raise GrammarFault("the list of choices is empty, so that no text is allowed")
    if (total := sum(map(len, choices))) > max_characters:
        raise GrammarFault(f"the choices have {total} characters, the limit is {max_characters}", hint="shorten the list")
    return "root ::= " + " | ".join(f'"{"".join(map(_escaped, choice))}"' for choice in dict.fromkeys(choices))


def _escaped(char: str) -> str:
    """One character inside a quoted literal of a grammar."""
    if " " <= char <= "~" and char not in '"\\':
        return char
    if 0xD800 <= ord(char) < 0xE000:
        raise GrammarFault(f"a choice holds the lone surrogate U+{ord(char):04X}, but must be Unicode text")
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def _can_begin(grammar: Grammar) -> bool:
    import xgrammar

    mask = xgrammar.allocate_token_bitmask(1, grammar.vocabulary.size)
    xgrammar.GrammarMatcher(grammar.compiled).fill_next_token_bitmask(mask)
    return bool(mask.any())


def _reason(error: Exception) -> str:
    """The library's message without its clock and source place, cut to a readable length."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if text.startswith("[") and ": " in text:
        text = text.split(": ", 1)[1]
    text = text.removeprefix("Check failed: ")
    return text if len(text) <= 300 else text[:297] + "..."
