"""SelfTest: does a draft head draft at all for this target? A few built-in prompts tell, once for each pair of weights.

Owns: the prompts, when they are asked, the verdict and its memory. Must not know: HTTP, or what a head computes.
A head that is read one place off, or was trained for other weights, is lossless and useless: nothing else would tell. The test begins
when the server is ready, asks one prompt at a time and only while nobody else asks anything, so it delays nothing. Its requests are
counted in the metrics like all others.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.config.trained_heads import ASSETS
from specdec.engine.types import EngineRequest
from specdec.errors import SpecdecError
from specdec.logging import get_logger
from specdec.models.source import cache_dir, content_hash, read_json
from specdec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specdec.config.engine import ResolvedConfig
    from specdec.engine.async_engine import AsyncEngine
    from specdec.engine.tokenizer import Tokenizer

logger = get_logger(__name__)

LEAST_ACCEPTANCE = 0.05
LEAST_DRAFTS = 32  # fewer tell nothing
ANSWER_TOKENS = 32
LOOK_EVERY_S = 0.5
TENANT = "specdec-self-test"  # what is learnt from these answers is nobody's
PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the largest number of a list.",
    "List five things to pack for a weekend in the mountains.",
    "Translate into French: the library opens at nine in the morning.",
    "What is 12 times 11? Show the steps.",
    "Write a short and friendly email that moves a meeting to Friday.",
)
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


class SelfTest:
    """The test of one server's heads. cache: directory of results, None for the user's."""

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, resolved: ResolvedConfig, *, cache: Path | None = None) -> None:
        self._engine, self._tokenizer, self._resolved = engine, tokenizer, resolved
        self._cache = cache or cache_dir() / "self-test"
        parts = (resolved, *resolved.sources)
        self.heads = {part.traits.method: part.draft_model_path for part in parts if part.traits and _is_tested(part)}

    async def run(self) -> None:
        """Test every head, or tell again what an earlier test found. Never raises: what cannot be tested is left."""
        try:
            for method, path in self.heads.items():
                assert path is not None, "only heads with a checkpoint are tested"
                await self._test(method, path)
        except (SpecdecError, OSError) as error:
            logger.info("the draft head was not tested: %s", error)

    async def _test(self, method: str, path: str) -> None:
        file = self._cache / f"{await asyncio.to_thread(self._key, method, path)}.json"
        if file.is_file():
            known = read_json(file)
            drafted, accepted = int(known["drafted"]), int(known["accepted"])
        else:
            drafted, accepted = await self._ask(method)
            if drafted < LEAST_DRAFTS:
                logger.info("self-test of the %s head: it drafted %d tokens only, too few to tell", method, drafted)
                return
            self._cache.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"method": method, "drafted": drafted, "accepted": accepted}), encoding="utf-8")
        _tell(method, path, drafted, accepted)

    async def _ask(self, method: str) -> tuple[int, int]:
        """Ask all prompts; return the head's draft tokens and how many of them were accepted."""
        drafted = accepted = 0
        for index, prompt in enumerate(PROMPTS):
            while self._engine.num_unfinished:
                await asyncio.sleep(LOOK_EVERY_S)
            request = EngineRequest(
                request_id=f"{TENANT}-{method}-{index}",
                prompt_token_ids=self._ids_of(prompt),
                sampling=SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS),
                tenant=TENANT,
            )
            async for output in self._engine.generate(request):
                if output.stats is not None:
                    counts = output.stats.by_source.get(method, [0, 0])
                    drafted, accepted = drafted + counts[0], accepted + counts[1]
        return drafted, accepted

    def _ids_of(self, prompt: str) -> tuple[int, ...]:
        ids: Sequence[int]
        if self._tokenizer.chat_template:
            ids = self._tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        else:
            ids = self._tokenizer.encode(prompt)
        return tuple(ids)[-max(self._resolved.max_model_len - ANSWER_TOKENS, 1) :]

    def _key(self, method: str, path: str) -> str:
        """Of the head's weights, of what it is asked to do, and of the target as far as it is told apart without reading all of it."""
        self._cache.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(f"{method} {self._resolved.engine.speculative!r}".encode())
        for file in _weights_of(path):
            digest.update(content_hash(file, self._cache).encode())
        for file in (Path(self._resolved.model_path) / "config.json", *_weights_of(self._resolved.model_path)):
            digest.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode())
        return digest.hexdigest()[:32]


def _is_tested(part: ResolvedConfig) -> bool:
    """Heads on the target's states, save those that come with this package: they were measured with their target."""
    path = part.draft_model_path
    return path is not None and part.traits is not None and bool(part.traits.taps) and ASSETS not in Path(path).resolve().parents


def _weights_of(path: str) -> list[Path]:
    return sorted(file for pattern in _WEIGHTS for file in Path(path).glob(pattern))


def _tell(method: str, path: str, drafted: int, accepted: int) -> None:
    share = accepted / drafted
    if share < LEAST_ACCEPTANCE:
        logger.warning(
            "self-test of the %s head %s: only %.1f%% of %d drafts were accepted. Answers are right all the same, but drafting costs more "
            "than it brings: was this head trained for this target, its revision and its chat template?",
            method,
            path,
            100 * share,
            drafted,
        )
    else:
        logger.info("self-test of the %s head: %.1f%% of %d drafts were accepted", method, 100 * share, drafted)
