"""The self-test of draft heads: a useless head is told, a good one is not, once for each pair of weights, and never in anybody's way."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.config.engine import ResolvedConfig
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.core import EngineCore
from specdec.engine.self_test import LEAST_DRAFTS, PROMPTS, SelfTest
from specdec.worker.worker import load_runner
from tests.engine.tokenizers_for_tests import toy_tokenizer
from tests.models.eagle_reference import write_head
from tests.proposers.heads import EAGLE, headed, plain_head, train, write_teachable
from tests.proposers.tiny import request

Log = pytest.LogCaptureFixture


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_teachable(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    random = write_head(tmp_path_factory.mktemp("random"), EAGLE, seed=1)
    taught = plain_head(target, random, EAGLE)
    train(taught, num_steps=200)
    return {"random": random, "taught": write_head(tmp_path_factory.mktemp("taught"), EAGLE, taught.reference.weights)}


@pytest.fixture
def told(caplog: Log, monkeypatch: pytest.MonkeyPatch) -> Log:
    monkeypatch.setattr(logging.getLogger("specdec"), "propagate", True)
    caplog.set_level(logging.INFO, logger="specdec")
    return caplog


def configured(target: Path, head: Path, **settings: Any) -> ResolvedConfig:
    return replace(headed(target, head, EAGLE, 2, **settings), eos_token_ids=())


def over(resolved: ResolvedConfig, cache: Path, test: Any) -> None:
    """Run `await test(engine, self_test)` over a new engine."""

    async def body() -> None:
        tokenizer = toy_tokenizer()
        engine = AsyncEngine(EngineCore(resolved, load_runner(resolved), tokenizer=tokenizer))
        try:
            job: Coroutine[Any, Any, None] = test(engine, SelfTest(engine, tokenizer, resolved, cache=cache))
            await asyncio.wait_for(job, timeout=60)
        finally:
            engine.close()

    asyncio.run(body())


async def only_test(engine: AsyncEngine, self_test: SelfTest) -> None:
    await self_test.run()


@pytest.mark.parametrize("name", ["random", "taught"])
def test_a_useless_head_is_told_and_a_good_one_only_noted(
    target: Path, heads: dict[str, Path], tmp_path: Path, told: Log, name: str
) -> None:
    over(configured(target, heads[name]), tmp_path, only_test)
    record = next(entry for entry in told.records if "self-test of the eagle head" in entry.getMessage())
    assert record.levelno == (logging.WARNING if name == "random" else logging.INFO)
    counts = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert counts["drafted"] >= LEAST_DRAFTS
    assert (counts["accepted"] / counts["drafted"] < 0.05) == (name == "random")


def test_a_pair_of_weights_is_tested_once(target: Path, heads: dict[str, Path], tmp_path: Path, told: Log) -> None:
    steps: list[int] = []

    async def counted(engine: AsyncEngine, self_test: SelfTest) -> None:
        await self_test.run()
        steps.append(engine.stats.num_steps)

    cache, copy = tmp_path / "cache", tmp_path / "head"
    copy.mkdir()
    for file in heads["random"].iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    for _ in range(2):
        over(configured(target, copy), cache, counted)
    assert steps[0] > 0
    assert steps[1] == 0  # nothing was asked, and the warning is there again
    assert sum(entry.levelno == logging.WARNING for entry in told.records) == 2
    weights = load_file(copy / "model.safetensors")
    save_file({name: weight + 0.5 * torch.ones_like(weight) for name, weight in weights.items()}, copy / "model.safetensors")
    over(configured(target, copy), cache, counted)
    assert steps[2] > 0


def test_it_waits_while_somebody_is_served(target: Path, heads: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.engine.self_test.LOOK_EVERY_S", 0.001)
    asked: list[tuple[int, bool]] = []

    async def beside(engine: AsyncEngine, self_test: SelfTest) -> None:
        stream = engine.generate(request("user", [5, 6, 7], max_tokens=80))
        generate, is_served = engine.generate, [True]

        def watched(entry: Any) -> Any:
            asked.append((engine.num_unfinished, is_served[0]))
            return generate(entry)

        monkeypatch.setattr(engine, "generate", watched)

        async def read() -> None:
            async for _ in stream:
                pass
            is_served[0] = False

        await asyncio.gather(read(), self_test.run())

    over(configured(target, heads["taught"]), tmp_path, beside)
    assert asked == [(0, False)] * len(PROMPTS)


def test_an_engine_that_stops_ends_the_test_without_noise(target: Path, heads: dict[str, Path], tmp_path: Path, told: Log) -> None:
    async def closed(engine: AsyncEngine, self_test: SelfTest) -> None:
        await asyncio.to_thread(engine.close)
        await self_test.run()

    over(configured(target, heads["taught"]), tmp_path, closed)
    assert "was not tested" in told.text
    assert not list(tmp_path.glob("*.json"))


def test_only_heads_with_weights_of_their_own_are_tested(target: Path, heads: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = configured(target, heads["taught"])
    engine: Any = None
    assert SelfTest(engine, toy_tokenizer(), resolved).heads == {"eagle": str(heads["taught"])}
    assert SelfTest(engine, toy_tokenizer(), replace(resolved, draft_model_path=None)).heads == {}
    assert SelfTest(engine, toy_tokenizer(), replace(resolved, traits=None, sources=(resolved,))).heads == {"eagle": str(heads["taught"])}
    monkeypatch.setattr("specdec.engine.self_test.ASSETS", heads["taught"].resolve().parent)
    assert SelfTest(engine, toy_tokenizer(), resolved).heads == {}
