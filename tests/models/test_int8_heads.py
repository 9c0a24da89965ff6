"""Heads in int8: products of the rounded weights, and heads that stay lossless, draft almost as before, and take less memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.config.engine import ResolvedConfig
from specdec.config.speculative import build
from specdec.errors import ConfigError
from specdec.models.int8_linear import Int8Linear
from specdec.models.linear import Linear
from specdec.proposers.base import DraftBatch, StepView, build_proposer
from tests.models.block_reference import BlockSpec, write_block_head
from tests.models.eagle_reference import write_head
from tests.models.hidden_head_reference import HiddenSpec, write_hidden_head
from tests.proposers.heads import EAGLE, EAGLE3, headed, plain_head, train, write_teachable
from tests.proposers.scenarios import SCENARIOS, check_lossless
from tests.proposers.test_block import headed as block_headed
from tests.proposers.test_hidden_head import headed as hidden_headed
from tests.proposers.test_mtp import drafting, with_module
from tests.proposers.tiny import mixed_requests, plain, prompts, request, run, write_checkpoint

OWN = {"eagle": replace(EAGLE, has_tables=True), "eagle3": EAGLE3}
INT8 = {"quantization": "int8"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture(scope="module")
def configured(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[..., ResolvedConfig]]:
    """Kind of head -> its configuration, given keys of the speculative config and engine settings."""
    make: dict[str, Callable[..., ResolvedConfig]] = {}
    for name, spec in OWN.items():
        path = write_head(tmp_path_factory.mktemp(name), spec, seed=7)
        make[name] = lambda config, path=path, spec=spec, **more: headed(target, path, spec, 3, config=config, **more)
    for name, block in {"dspark": BlockSpec(), "dflash": BlockSpec(method="dflash")}.items():
        path = write_block_head(tmp_path_factory.mktemp(name), block, seed=7)
        make[name] = lambda config, path=path, name=name, **more: block_headed(target, path, 3, method=name, config=config, **more)
    for name in ("medusa", "mlp_speculator"):
        path = write_hidden_head(tmp_path_factory.mktemp(name), HiddenSpec(method=name), seed=7)
        make[name] = lambda config, path=path, **more: hidden_headed(target, path, 3, config=config, **more)
    module = with_module(target, tmp_path_factory.mktemp("mtp"), "deepseek")
    make["mtp"] = lambda config, **more: drafting(module, 3, config=config, **more)
    return make


KINDS = (*OWN, "dspark", "dflash", "medusa", "mlp_speculator", "mtp")


def _given(made: Any, _: ResolvedConfig) -> Any:
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(48, 64), (97, 33)], ids=str)
def test_a_product_is_that_of_the_rounded_weight(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(shape, generator=generator) * torch.logspace(-3, 0, shape[0])[:, None]).to(dtype)
    weight[5] = 0  # a row without a scale
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    x = torch.randn(3, shape[1], generator=generator).to(dtype)
    linear = Int8Linear(weight, bias)
    steps = linear.weight.double() * linear.scale.double()[:, None]
    assert float((steps - weight.double()).abs().div(weight.double().abs().amax(1, keepdim=True).clamp(min=1e-9)).max()) < 0.6 / 127 + 0.004
    want = x.double() @ steps.T + bias.double()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(linear(x).double(), want, atol=tolerance, rtol=tolerance)
    assert linear(x).dtype is dtype
    assert linear.wide(x).dtype is torch.float32
    index = torch.tensor([7, 2, 5])
    torch.testing.assert_close(linear.rows(index)(x), linear(x)[:, index], atol=tolerance, rtol=tolerance)
    whole = Linear(weight, bias)
    assert linear.num_bytes < 0.6 * whole.num_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_a_rounded_head_is_lossless_smaller_and_drafts_almost_the_same(
    target: Path, configured: dict[str, Callable[..., ResolvedConfig]], kind: str
) -> None:
    seen: list[dict[tuple[int, ...], list[int]]] = []
    sizes = []
    for config in ({}, INT8):
        resolved = configured[kind](config, **SCENARIOS[2].settings)
        drafts: dict[tuple[int, ...], list[int]] = {}
        seen.append(drafts)
        proposer: Any = build_proposer(resolved)
        sizes.append(proposer.memory().weights_bytes)
        propose = proposer.propose

        def watched(step: StepView, propose: Any = propose, drafts: dict[tuple[int, ...], list[int]] = drafts) -> DraftBatch:
            batch: DraftBatch = propose(step)
            for index, row in enumerate(step.rows.tolist()):
                text = tuple(step.token_ids[row, : int(step.num_tokens[row])].tolist())
                drafts[text] = batch.token_ids[index, : int(batch.num_nodes[index])].tolist()
            return batch

        proposer.propose = watched
        served = Path(resolved.model_path)
        assert resolved.traits is not None
        check_lossless(served, SCENARIOS[2], traits=resolved.traits, make=partial(_given, proposer), build=partial(_given, resolved))
    assert sizes[1] < 0.75 * sizes[0]
    firsts = [(seen[0][text][0], seen[1][text][0]) for text in seen[0].keys() & seen[1].keys() if seen[0][text] and seen[1][text]]
    assert len(firsts) > 30
    assert sum(a == b for a, b in firsts) / len(firsts) > 0.85


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_trained_head_is_accepted_as_often_when_it_is_rounded(tmp_path: Path, kind: str) -> None:
    target = write_teachable(tmp_path / "target")
    spec = replace(OWN[kind], draft_vocab=97, has_tables=True, taps=(1, 2, 3) if kind == "eagle3" else ())
    taught = plain_head(target, write_head(tmp_path / "raw", spec, seed=1), spec)
    train(taught, num_steps=250)
    path = write_head(tmp_path / "taught", spec, taught.reference.weights)
    requests = [request(f"a{i}", text, max_tokens=40) for i, text in enumerate(prompts(12, seed=22))]
    whole, rounded = (run(headed(target, path, spec, 2, config=config), requests) for config in ({}, INT8))
    assert whole.token_ids == rounded.token_ids == plain(target, requests)
    share = whole.num_accepted() / whole.num_drafted()
    assert share > 0.15
    assert rounded.num_accepted() / rounded.num_drafted() > 0.95 * share


def test_a_rounded_head_sleeps_wakes_and_takes_other_weights(target: Path, configured: dict[str, Callable[..., ResolvedConfig]]) -> None:
    resolved = configured["dspark"](INT8)
    proposer: Any = build_proposer(resolved)
    before = proposer.memory().weights_bytes
    proposer.sleep()
    proposer.wake()
    proposer.reload()
    assert proposer.memory().weights_bytes == before
    assert run(resolved, mixed_requests(), lambda _: proposer).token_ids == plain(target, mixed_requests())


@pytest.mark.parametrize("method", ["draft_model", "early_exit"])
def test_whole_models_refuse_it(method: str) -> None:
    more = {"exit_layer": 2} if method == "early_exit" else {"model": "org/small"}
    with pytest.raises(ConfigError, match=f"quantization is `int8`, but method `{method}` drafts in the target's dtype"):
        build({"method": method, "num_speculative_tokens": 3, **more, **INT8})
    with pytest.raises(ConfigError, match="quantization does not apply to method `ngram`"):
        build({"method": "ngram", "num_speculative_tokens": 3, **INT8})
    with pytest.raises(ConfigError, match="quantization is 'fp8', but it must be"):
        build({"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3, "quantization": "fp8"})
