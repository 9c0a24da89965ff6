"""Sleep, wake and new weights: afterwards an engine answers, drafts and finds prefixes as one that has just been started with them."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import DraftModelConfig, EarlyExitConfig, NgramConfig
from specdec.config.methods import traits_for
from specdec.config.speculative import HybridConfig
from specdec.engine.llm import LLM
from specdec.errors import ConfigError, EngineAsleep, RequestRejected
from specdec.models.attention import allocate_kv, release_kv, restore_kv
from specdec.sampling_params import SamplingParams
from tests.models.eagle_reference import write_head
from tests.proposers.heads import EAGLE3, headed
from tests.proposers.tiny import Run, mixed_requests, resolved_for, start, with_draft, write_checkpoint


@dataclass(frozen=True)
class Files:
    """Two sets of weights for everything."""

    targets: tuple[Path, Path]
    drafts: tuple[Path, Path]
    heads: tuple[Path, Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    def two(name: str, write: Callable[[Path, int], Path]) -> tuple[Path, Path]:
        first, second = (write(tmp_path_factory.mktemp(f"{name}{seed}"), seed) for seed in (1, 2))
        return first, second

    return Files(
        two("target", lambda path, seed: write_checkpoint(path, seed=seed, num_layers=3)),
        two("draft", lambda path, seed: write_checkpoint(path, seed=seed + 10)),
        two("head", lambda path, seed: write_head(path, EAGLE3, seed=seed)),
    )


def plain(files: Files, which: int) -> ResolvedConfig:
    return resolved_for(files.targets[which])


def draft_model(files: Files, which: int) -> ResolvedConfig:
    config = DraftModelConfig(model=str(files.drafts[which]), num_speculative_tokens=3)
    return with_draft(resolved_for(files.targets[which], traits=traits_for(config), speculative=config), files.drafts[which])


def own_draft(files: Files, which: int) -> ResolvedConfig:
    config = DraftModelConfig(model=str(files.targets[which]), num_speculative_tokens=3)
    return with_draft(resolved_for(files.targets[which], traits=traits_for(config), speculative=config), files.targets[which])


def eagle3(files: Files, which: int) -> ResolvedConfig:
    return headed(files.targets[which], files.heads[which], EAGLE3, 3)


def early_exit(files: Files, which: int) -> ResolvedConfig:
    config = EarlyExitConfig(num_speculative_tokens=3, exit_layer=2)
    return resolved_for(files.targets[which], traits=traits_for(config), speculative=config)


def hybrid(files: Files, which: int) -> ResolvedConfig:
    lookup = NgramConfig(num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)
    parts = (resolved_for(files.targets[which], traits=traits_for(lookup), speculative=lookup), draft_model(files, which))
    config = HybridConfig(num_speculative_tokens=3, sources=tuple(part.engine.speculative for part in parts))
    resolved = resolved_for(files.targets[which], traits=traits_for(config), speculative=config)
    return replace(resolved, sources=parts)


def heads_path(files: Files) -> str:
    return str(files.heads[1])


def drafts_path(files: Files) -> str:
    return str(files.drafts[1])


Build = Callable[[Files, int], ResolvedConfig]
METHODS: dict[str, tuple[Build, Callable[[Files], str] | None]] = {  # and where the drafter's second weights lie
    "plain": (plain, None),
    "draft_model": (draft_model, drafts_path),
    "own_draft": (own_draft, None),
    "eagle3": (eagle3, heads_path),
    "early_exit": (early_exit, None),
    "hybrid": (hybrid, drafts_path),
}


def answers(running: Run) -> dict[str, tuple[object, ...]]:
    """Ids of mixed requests, what was drafted and kept for them, and how much of their prompts was found in the cache."""
    running.num_cached_tokens.clear()
    running.add(mixed_requests())
    while running.core.has_work:
        running.step()
    return {
        name: (
            tuple(ids),
            running.stats[name].num_drafts,
            running.stats[name].num_draft_tokens,
            running.stats[name].num_verified_tokens,
            running.num_cached_tokens.get(name, 0),
        )
        for name, ids in running.token_ids.items()
    }


def comparable(method: str, given: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    """A hybrid remembers how its sources did, so that its drafts may be others; ids and prefix hits may not."""
    return {name: (entry[0], entry[-1]) if method == "hybrid" else entry for name, entry in given.items()}


@pytest.mark.parametrize("level", [0, 1, 2], ids=["awake", "level1", "level2"])
@pytest.mark.parametrize("method", METHODS)
def test_other_weights_answer_and_draft_like_a_fresh_start(files: Files, method: str, level: int) -> None:
    build, draft = METHODS[method]
    fresh = [comparable(method, answers(start(build(files, which)))) for which in (0, 1)]
    running = start(build(files, 0))
    assert comparable(method, answers(running)) == fresh[0]
    if level:
        running.core.sleep(level)
    running.core.reload_weights(str(files.targets[1]), draft(files) if draft else None)
    assert not running.core.is_sleeping
    again = comparable(method, answers(running))
    assert again == fresh[1]
    assert all(again[name][0] != fresh[0][name][0] for name in again), "the two targets must differ"
    running.core.sleep(2)
    running.core.wake_up()
    assert comparable(method, answers(running)) == fresh[1], "waking reads the weights that were read last"


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("method", ["plain", "eagle3", "early_exit", "hybrid"])
def test_the_same_weights_come_back(files: Files, method: str, level: int) -> None:
    running = start(METHODS[method][0](files, 0))
    first = comparable(method, answers(running))
    running.core.sleep(level)
    with pytest.raises(EngineAsleep):
        running.add(mixed_requests()[:1])
    running.token_ids.clear()
    running.core.sleep(1)  # lighter than or equal to what is: no change
    running.core.wake_up()
    running.core.wake_up()
    assert comparable(method, answers(running)) == first, "no prefix of the time before may be found"


def test_level_2_lets_go_of_all_weights(files: Files) -> None:
    for build in (plain, eagle3, early_exit, hybrid):
        running = start(build(files, 0))
        answers(running)
        model = running.runner.model
        layer = weakref.ref(model.layers[1])  # type: ignore[attr-defined]
        del model
        running.core.sleep(2)
        gc.collect()
        assert layer() is None, build.__name__
        running.core.wake_up()
        running.core.close()


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssShmem")).split()[1])


def test_released_caches_give_their_memory_back_and_read_as_zeros() -> None:
    kv = allocate_kv(2, (512, 16, 4, 64), dtype=torch.float32, device=torch.device("cpu"))
    num_bytes = 4 * kv[0][0].numel() * 4
    for pair in kv:
        for cache in pair:
            cache.fill_(7)
    before = resident_bytes()
    release_kv(kv)
    assert before - resident_bytes() > 0.9 * num_bytes
    restore_kv(kv)
    assert not any(bool(cache.any()) for pair in kv for cache in pair)
    kv[1][1][3, 2, 1] = 5
    assert float(kv[1][1].sum()) == 5 * 64


def test_nothing_changes_where_weights_cannot_be_read(files: Files, tmp_path: Path) -> None:
    running = start(draft_model(files, 0))
    first = answers(running)
    other = write_checkpoint(tmp_path / "other", seed=3, num_layers=2)
    broken = write_checkpoint(tmp_path / "broken", seed=4, num_layers=3)
    (broken / "model.safetensors").write_bytes(b"nothing")
    theta = write_checkpoint(tmp_path / "theta", seed=5, num_layers=3)
    config = json.loads((theta / "config.json").read_text(encoding="utf-8"))
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    (theta / "config.json").write_text(json.dumps(config), encoding="utf-8")
    good, draft = str(files.targets[1]), str(files.drafts[1])
    cases = (
        (str(other), None, "num_hidden_layers 2, but the loaded model has 3"),
        (str(theta), None, "rope"),
        (str(broken), None, "not a safetensors file"),
        (str(tmp_path / "none"), None, "was not found"),
        (good, str(files.targets[1]), "draft_weights_path .* num_hidden_layers 3, but the loaded model has 2"),
    )
    for target, drafter, message in cases:
        with pytest.raises(ConfigError, match=message):
            running.core.reload_weights(target, drafter)
        assert answers(running)["r0"][:4] == first["r0"][:4]
    damaged = write_checkpoint(tmp_path / "damaged", seed=6)
    tensors = load_file(damaged / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up" not in name}, damaged / "model.safetensors")
    with pytest.raises(ConfigError, match="is missing"):  # found out when the target is in place already
        running.core.reload_weights(good, str(damaged))
    assert answers(running)["r0"][:4] == first["r0"][:4]
    running.core.sleep(2)
    with pytest.raises(ConfigError):
        running.core.reload_weights(good, str(damaged))
    assert running.core.is_sleeping
    running.core.reload_weights(good, draft)
    assert answers(running) == answers(start(draft_model(files, 1)))


def test_what_cannot_be_done_is_refused(files: Files) -> None:
    running = start(plain(files, 0))
    with pytest.raises(RequestRejected, match="level is 3, but it must be 1"):
        running.core.sleep(3)
    with pytest.raises(ConfigError, match="the drafter has no weights"):
        running.core.reload_weights(None, str(files.drafts[1]))
    running.add(mixed_requests()[:2])
    with pytest.raises(RequestRejected, match="2 requests have not ended"):
        running.core.sleep(1)
    running.finish()


def test_llm_sleeps_and_takes_new_weights(files: Files) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def ids(llm: LLM) -> list[tuple[int, ...]]:
        return [tuple(result.outputs[0].token_ids) for result in llm.generate([[5, 6, 7, 8], [9, 3]], sampling, use_tqdm=False)]

    def built(which: int) -> LLM:
        return LLM.from_core(start(draft_model(files, which)).core)

    with built(0) as llm, built(1) as other:
        before, expected = ids(llm), ids(other)
        llm.sleep(level=2)
        llm.wake_up()
        assert ids(llm) == before
        llm.reload_weights(str(files.targets[1]), str(files.drafts[1]))
        assert ids(llm) == expected != before
