"""Compiling: once per constraint, within limits, off the event loop, and every refusal names the field."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from specdec.engine.token_table import vocabulary_of
from specdec.engine.tokenizer import Tokenizer
from specdec.errors import QueueFull, RequestRejected
from specdec.sampling_params import StructuredOutputParams
from specdec.structured.compiler import CompileLimits, Grammar, GrammarCompiler
from specdec.structured.vocabulary import Vocabulary
from tests.structured.test_schema import accepts
from tests.structured.vocabulary import EOS, TOOL, VOCAB_SIZE

BYTES = Vocabulary((*(bytes([byte]) for byte in range(256)), b""), (256,))


def regex(pattern: str) -> StructuredOutputParams:
    return StructuredOutputParams(regex=pattern)


def small(**limits: float) -> GrammarCompiler:
    return GrammarCompiler(lambda: BYTES, limits=CompileLimits(**limits))  # type: ignore[arg-type]


def test_a_constraint_is_compiled_once() -> None:
    compiler = small()
    first = compiler.compile(regex("a+"), field="f")
    assert compiler.compile(regex("a+"), field="g") is first
    assert compiler.compile(regex("b+"), field="f") is not first
    assert compiler.num_compiled == 2


def test_the_least_recently_used_grammar_is_dropped_first() -> None:
    compiler = small()
    sizes = [compiler.compile(regex(f"{letter}+"), field="f").num_bytes for letter in "ab"]
    compiler = small(max_cache_bytes=sum(sizes))
    first = compiler.compile(regex("a+"), field="f")
    compiler.compile(regex("b+"), field="f")
    assert compiler.compile(regex("a+"), field="f") is first
    compiler.compile(regex("c+"), field="f")  # drops b, which was not asked for since
    assert compiler.compile(regex("a+"), field="f") is first
    assert compiler.num_compiled == 3
    compiler.compile(regex("b+"), field="f")
    assert compiler.num_compiled == 4


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        (regex("(a"), "Regex parsing error at position 3: The parenthesis is not closed"),
        (regex("(?=a)"), "Lookahead is not supported"),
        (regex("\ud800"), "lone surrogate"),
        (StructuredOutputParams(json_schema='{"type": "foo"}'), 'Unsupported type "foo"'),
        (StructuredOutputParams(grammar="root ::= other"), 'Rule "other" is not defined'),
        (StructuredOutputParams(grammar="root ::= root"), "no token of this model can begin"),
        (StructuredOutputParams(choice=()), "choices is empty"),
        (StructuredOutputParams(choice=("\udfff",)), r"lone surrogate U\+DFFF"),
        (StructuredOutputParams(), "exactly one constraint"),
        (StructuredOutputParams(json_object=True, regex="a"), "exactly one constraint"),
    ],
)
def test_a_wrong_constraint_names_the_field_and_the_fault(wish: StructuredOutputParams, text: str) -> None:
    compiler = small()
    for _ in range(2):  # failures are not kept: the second time is a fresh one
        with pytest.raises(RequestRejected, match=f"^guided_x cannot be used: .*{text}") as caught:
            compiler.compile(wish, field="guided_x")
        assert caught.value.param == "guided_x"


@pytest.mark.parametrize(
    "wish", [regex("a" * 51), StructuredOutputParams(choice=("a" * 50, "b")), StructuredOutputParams(grammar="#" * 51)]
)
def test_long_texts_are_refused(wish: StructuredOutputParams) -> None:
    with pytest.raises(RequestRejected, match="51 characters, the limit is 50"):
        small(max_characters=50).compile(wish, field="f")


def test_big_tables_are_refused() -> None:
    with pytest.raises(RequestRejected, match="bytes, the limit is 100"):
        small(max_grammar_bytes=100).compile(regex("[a-z]{3}x"), field="f")


def test_a_model_without_an_end_token_serves_no_constraint() -> None:
    with pytest.raises(RequestRejected, match="no end-of-sequence token"):
        GrammarCompiler(lambda: Vocabulary((b"a",), ())).compile(regex("a"), field="f")


@pytest.mark.parametrize("text", ["yes", 'a"b\\c\nd\te', "é🎉", "", "\x00\x7f", "#x", "[a] (b)* ::="])
def test_choices_are_taken_literally(text: str) -> None:
    compiled = small().compile(StructuredOutputParams(choice=(text, "other", text)), field="f")
    assert accepts(compiled, text)
    assert accepts(compiled, "other")
    assert not accepts(compiled, text + "x")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opened after the test, so that no thread is left waiting."""
    event = threading.Event()
    yield event
    event.set()


def gated(gate: threading.Event, **limits: float) -> GrammarCompiler:
    def read() -> Vocabulary:
        assert gate.wait(30)
        return BYTES

    return GrammarCompiler(read, limits=CompileLimits(**limits))  # type: ignore[arg-type]


def test_compiling_has_a_time_limit(gate: threading.Event) -> None:
    compiler = gated(gate, timeout_s=0.05)
    with pytest.raises(RequestRejected, match=r"compiling it takes longer than 0\.05 s"):
        compiler.compile(regex("a"), field="f")


def test_what_took_too_long_is_there_the_next_time(gate: threading.Event) -> None:
    compiler = gated(gate, timeout_s=0.05)
    with pytest.raises(RequestRejected, match="takes longer"):
        compiler.compile(regex("a"), field="f")
    gate.set()
    compiler.limits = CompileLimits()
    assert accepts(compiler.compile(regex("a"), field="f"), "a")
    assert compiler.num_compiled == 1


def test_the_event_loop_goes_on_while_a_grammar_is_compiled(gate: threading.Event) -> None:
    compiler = gated(gate)

    async def run() -> tuple[Grammar, Grammar]:
        waiting = [asyncio.ensure_future(compiler.compile_async(regex("a"), field="f")) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in waiting)
        waiting[0].cancel()  # one client leaves; the other gets its grammar
        late = asyncio.ensure_future(compiler.compile_async(regex("a"), field="f"))
        gate.set()
        return await waiting[1], await late

    first, second = asyncio.run(run())
    assert first is second
    assert compiler.num_compiled == 1


def test_the_time_limit_holds_on_the_event_loop_too(gate: threading.Event) -> None:
    with pytest.raises(RequestRejected, match="takes longer"):
        asyncio.run(gated(gate, timeout_s=0.05).compile_async(regex("a"), field="f"))


def test_a_flood_of_constraints_is_turned_away(gate: threading.Event) -> None:
    compiler = gated(gate, timeout_s=0.01, max_pending=3)
    for pattern in "abc":
        with pytest.raises(RequestRejected):
            compiler.compile(regex(pattern), field="f")
    with pytest.raises(QueueFull, match="3 schemas"):
        compiler.compile(regex("d"), field="f")
    with pytest.raises(RequestRejected):  # a known one waits with the others
        compiler.compile(regex("a"), field="f")


def test_special_and_padding_ids_spell_nothing(tokenizer: Tokenizer, grammar: Callable[..., Grammar]) -> None:
    vocabulary = vocabulary_of(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    assert vocabulary.size == VOCAB_SIZE > tokenizer.vocab_size
    assert vocabulary.token_bytes[EOS] == vocabulary.token_bytes[TOOL] == vocabulary.token_bytes[-1] == b""
    assert vocabulary.token_bytes[tokenizer.encode('{"')[0]] == b'{"'
    assert sorted(vocabulary.token_bytes[:256]) == [bytes([byte]) for byte in range(256)]
    assert vocabulary.ending_ids((TOOL, 65)) == (EOS, TOOL)
