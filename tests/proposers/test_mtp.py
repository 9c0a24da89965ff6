"""Multi-token-prediction modules inside the target's checkpoint: lossless, and every draft equal to a plain reference's."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import MtpConfig
from specdec.config.methods import traits_for
from specdec.errors import ConfigError
from specdec.models.registry import load_model
from specdec.proposers.base import DraftBatch, StepView, build_proposer
from specdec.proposers.eagle import EagleProposer
from tests.law.scoring import judge
from tests.models.eagle_reference import _norm, _rope
from tests.proposers.scenarios import SCENARIOS, Scenario, check_lossless
from tests.proposers.tiny import plain, prompts, request, resolved_for, run, write_checkpoint

LATENT = "model.layers.2.self_attn.kv_a_proj_with_mqa"
WIDTH, MLP, HEADS, KV_HEADS, SIZE, EPS = 32, 64, 4, 2, 8, 1e-6
BLOCK = {
    "self_attn.q_proj": (HEADS * SIZE, WIDTH), "self_attn.k_proj": (KV_HEADS * SIZE, WIDTH), "self_attn.v_proj": (KV_HEADS * SIZE, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * SIZE), "mlp.gate_proj": (MLP, WIDTH), "mlp.up_proj": (MLP, WIDTH), "mlp.down_proj": (WIDTH, MLP),
    "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
}  # fmt: skip
OUTER = {  # family -> names of (token norm, hidden norm, projection, final norm), and where outer parts and the layer lie
    "deepseek": (("enorm", "hnorm", "eh_proj", "shared_head.norm"), "model.layers.2.", "model.layers.2."),
    "qwen3_next": (("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "mtp.", "mtp.layers.0."),
    "mimo": (("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), "model.mtp_layers.0.", "model.mtp_layers.0."),
}


def with_module(
    target: Path, out: Path, family: str, *, drop: str = "", more: dict[str, torch.Tensor] | None = None, depth: int = 1
) -> Path:
    """The target's checkpoint with a random module of a family in it."""
    LlamaForCausalLM.from_pretrained(target).save_pretrained(out)
    (token_norm, hidden_norm, projection, final_norm), outer, layer = OUTER[family]
    shapes: dict[str, tuple[int, ...]] = {f"{layer}{name}.weight": shape for name, shape in BLOCK.items()}
    shapes |= {f"{outer}{name}.weight": (WIDTH,) for name in (token_norm, hidden_norm, final_norm)}
    shapes[f"{outer}{projection}.weight"] = (WIDTH, 2 * WIDTH)
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.2 * noise if len(shape) == 1 else noise * 1.5 / math.sqrt(shape[1])
    weights |= more or {}
    save_file(load_file(out / "model.safetensors") | {k: v for k, v in weights.items() if k != drop}, out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    kind = {"architectures": ["MiMoForCausalLM"]} if family == "mimo" else {}
    (out / "config.json").write_text(json.dumps(config | kind | {"num_nextn_predict_layers": depth}))
    return out


@pytest.fixture(scope="module")
def targets(target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: with_module(target_path, tmp_path_factory.mktemp(family), family) for family in OUTER}


def drafting(target: Path, drafts: int, *, config: dict[str, Any] | None = None, **settings: Any) -> ResolvedConfig:
    speculative = MtpConfig(num_speculative_tokens=drafts, **(config or {}))
    keys = json.loads((target / "config.json").read_text())
    resolved = resolved_for(target, traits=traits_for(speculative, keys, num_target_layers=2), speculative=speculative, **settings)
    return replace(resolved, draft_model_path=str(target), draft_hf_config=LlamaConfig.from_pretrained(target))


class PlainModule:
    """What the module drafts behind a text, read afresh each time, in float32."""

    def __init__(self, target: Path, family: str, *, scored: Sequence[int] = range(97)) -> None:
        self.weights, self.family, self.scored = load_file(target / "model.safetensors"), family, list(scored)
        self.model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.eps = self.model.config.rms_norm_eps

    @torch.no_grad()
    def drafts(self, text: list[int], count: int) -> list[int]:
        features = self.features(text[:-1])
        ids, found = text[1:], []
        for _ in range(count):
            normed = self.rows(torch.tensor(ids), features)
            found.append(self.best(normed[-1]))
            ids, features = [*ids, found[-1]], torch.cat([features, normed[-1:]])
        return found

    def best(self, normed: torch.Tensor) -> int:
        """The likeliest of the ids that are scored."""
        return self.scored[int((normed @ self.model.lm_head.weight[self.scored].T).argmax())]

    def features(self, text: list[int]) -> torch.Tensor:
        """The target's last state [T, H], normed but for MiMo, whose module reads the stream that the norm is given."""
        streams: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0][0]))
        normed = self.model.model(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state[0]
        hook.remove()
        return streams[0] if self.family == "mimo" else normed

    def rows(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Row j: token of position j + 1 with the feature of position j."""
        (token_norm, hidden_norm, projection, final_norm), outer, layer = OUTER[self.family]
        own = {name: self.weights[f"{outer}{name}.weight"] for name in (token_norm, hidden_norm, projection, final_norm)}
        token = self.model.model.embed_tokens.weight[ids].clone()
        if self.family != "qwen3_next":
            token[0] = 0
        token, hidden = _norm(token, own[token_norm], self.eps), _norm(features, own[hidden_norm], self.eps)
        parts = [hidden, token] if self.family == "mimo" else [token, hidden]
        stream = torch.cat(parts, dim=-1) @ own[projection].T
        block = {name: self.weights[f"{layer}{name}.weight"] for name in BLOCK}
        stream = stream + self.attention(block, _norm(stream, block["input_layernorm"], self.eps))
        normed = _norm(stream, block["post_attention_layernorm"], self.eps)
        gate = normed @ block["mlp.gate_proj"].T
        stream = stream + (gate * torch.sigmoid(gate) * (normed @ block["mlp.up_proj"].T)) @ block["mlp.down_proj"].T
        return _norm(stream, own[final_norm], self.eps)

    def attention(self, block: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        query = _rope((x @ block["self_attn.q_proj"].T).view(rows, HEADS, SIZE), 10000.0)
        key = _rope((x @ block["self_attn.k_proj"].T).view(rows, KV_HEADS, SIZE), 10000.0)
        value = (x @ block["self_attn.v_proj"].T).view(rows, KV_HEADS, SIZE)
        hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        out = []
        for head in range(HEADS):
            scores = query[:, head] @ key[:, head // 2].T / math.sqrt(SIZE)
            out.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ value[:, head // 2])
        return torch.cat(out, dim=-1) @ block["self_attn.o_proj"].T


class Recording(EagleProposer):
    def __init__(self, resolved: ResolvedConfig) -> None:
        super().__init__(resolved)
        self.seen: list[tuple[list[int], list[int]]] = []

    def propose(self, step: StepView) -> DraftBatch:
        batch = super().propose(step)
        for index, row in enumerate(step.rows.tolist()):
            if count := int(batch.num_nodes[index]):
                self.seen.append((step.token_ids[row, : int(step.num_tokens[row])].tolist(), batch.token_ids[index, :count].tolist()))
        return batch


@pytest.mark.parametrize("drafts", [1, 4])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("family", list(OUTER))
def test_a_module_is_lossless_and_drafts_what_the_reference_drafts(
    targets: dict[str, Path], family: str, scenario: Scenario, drafts: int
) -> None:
    made: list[Recording] = []

    def make(resolved: ResolvedConfig) -> Recording:
        made.append(Recording(resolved))
        return made[-1]

    resolved = drafting(targets[family], drafts, **scenario.settings)
    check_lossless(targets[family], scenario, traits=resolved.traits, make=make, build=lambda _: resolved)
    reference = PlainModule(targets[family], family)
    seen = made[0].seen
    assert len(seen) > 40
    for text, given in seen[:: max(len(seen) // 20, 1)]:
        assert given == reference.drafts(text, len(given)), f"behind {len(text)} tokens"


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_drawn_drafts_keep_the_law(targets: dict[str, Path], rule: str) -> None:
    config = {"draft_sample_method": "probabilistic", "rejection_sample_method": rule}
    requests = [
        request(f"p{i}", text, temperature=0.8, max_tokens=60, seed=1000 + i) for i, text in enumerate(prompts(30, seed=3, longest=12))
    ]
    result = run(drafting(targets["deepseek"], 3, config=config, max_num_seqs=16), requests)
    assert judge(targets["deepseek"], requests, result.token_ids).is_lawful
    assert result.num_accepted() > 0


def test_the_target_is_read_as_if_the_module_were_not_there(target_path: Path, targets: dict[str, Path]) -> None:
    requests = [request(f"r{i}", text, max_tokens=12) for i, text in enumerate(prompts(4, seed=2, longest=9))]
    for path in targets.values():
        assert plain(path, requests) == plain(target_path, requests)


def test_further_layers_of_qwen3_next_are_left_and_said(
    target_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("specdec"), "propagate", True)
    extra = {f"mtp.layers.1.{name}.weight": torch.zeros(shape) for name, shape in BLOCK.items()}
    path = with_module(target_path, tmp_path / "two", "qwen3_next", more=extra, depth=2)
    assert isinstance(build_proposer(drafting(path, 4)), EagleProposer)
    assert "2 MTP modules" in caplog.text


@pytest.mark.parametrize(
    ("drop", "more", "message"),
    [
        ("model.layers.2.hnorm.weight", {}, "hnorm"),
        ("model.layers.2.eh_proj.weight", {}, "no MTP module of a known family"),
        ("model.layers.2.mlp.gate_proj.weight", {}, "mixture of experts"),
        (
            "model.layers.2.self_attn.q_proj.weight",
            {"model.layers.2.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(2, 2)},
            "latent attention",
        ),
        ("", {"model.layers.2.surprise.weight": torch.zeros(2)}, "unexpected tensor"),
    ],
)
def test_a_module_that_cannot_be_served_is_refused_by_name(
    target_path: Path, tmp_path: Path, drop: str, more: dict[str, torch.Tensor], message: str
) -> None:
    path = with_module(target_path, tmp_path / "bad", "deepseek", drop=drop, more=more)
    load_model(
        str(path), LlamaConfig.from_pretrained(path), dtype=torch.float32, device=torch.device("cpu"), max_model_len=64
    )  # plain: fine
    with pytest.raises(ConfigError, match=message):
        EagleProposer(drafting(path, 3))


def test_a_target_without_modules_has_none(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "plain", seed=1)
    with pytest.raises(ConfigError, match="no MTP module"):
        EagleProposer(drafting(path, 1))
