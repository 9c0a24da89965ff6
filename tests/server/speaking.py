"""Servers that say what a test wants: a scripted text in steps of several tokens, or what a grammar lets a random model say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai

from specdec.config.methods import traits_for
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.core import EngineCore
from specdec.engine.tokenizer import Tokenizer
from specdec.server.app import create_app
from specdec.server.options import ServerOptions
from specdec.worker.worker import load_runner
from tests.server.serving import Served, hosting, serving
from tests.structured.vocabulary import EOS, VOCAB_SIZE, json_tokenizer, resolved_for, write_target
from tests.toy import scripted_target

# A template in the manner of Qwen: it shows tools, calls and results.
TOOL_TEMPLATE = (
    "{% if tools %}tools: {% for tool in tools %}{{ tool | tojson }} {% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %} for {{ m.tool_call_id }}{% endif %} {% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer_with(template: str) -> Tokenizer:
    """The tokenizer that can spell JSON, with a chat template."""
    tokenizer = json_tokenizer()
    tokenizer.hf.chat_template = template
    return tokenizer


@contextmanager
def speaking(text: str, *, template: str = TOOL_TEMPLATE, options: ServerOptions | None = None, **toy: Any) -> Iterator[Served]:
    """A server whose every answer is `text`, in steps of one to four tokens."""
    tokenizer = tokenizer_with(template)
    output = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    sizes = {"vocab_size": VOCAB_SIZE, "eos_token_ids": (EOS,), "max_model_len": 4096, "num_blocks": 4096, "max_num_batched_tokens": 4096}
    with serving(target=scripted_target(output), tokenizer=tokenizer, options=options, **sizes | toy) as served:
        yield served


@contextmanager
def tiny_app(
    path: Path, *, template: str = TOOL_TEMPLATE, options: ServerOptions | None = None, speculative: Any = None, max_model_len: int = 3000
) -> Iterator[tuple[str, httpx.Client]]:
    """A server of a random model that can spell JSON, with everything behind it as in production; yields its URL."""
    tokenizer = tokenizer_with(template)
    traits = traits_for(speculative) if speculative is not None else None
    resolved = resolved_for(write_target(path), traits=traits, speculative=speculative, num_blocks=1600)
    resolved = replace(resolved, max_model_len=max_model_len)
    engine = AsyncEngine(EngineCore(resolved, load_runner(resolved), tokenizer=tokenizer))
    try:
        with hosting(create_app(engine, tokenizer, resolved, options=options)) as (url, _, http):
            yield url, http
    finally:
        engine.close()


@contextmanager
def babbling(path: Path, *, options: ServerOptions | None = None, speculative: Any = None) -> Iterator[openai.OpenAI]:
    """A client of a random model, of which only a grammar makes sense."""
    with tiny_app(path, options=options, speculative=speculative) as (url, http):
        yield openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, http_client=http)
