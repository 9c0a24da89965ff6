"""EAGLE-1 and EAGLE-3 heads: what they compute equals a plain reference; checkpoints that do not fit are refused by name."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.config.checkpoints import draft_hf_config
from specdec.config.compatibility import flatten
from specdec.config.methods import FINAL_NORM, Tap
from specdec.errors import ConfigError
from specdec.models.attention import AttentionMetadata, allocate_kv
from specdec.models.draft_head import DraftHead, HeadSetting, HeadStates
from specdec.models.eagle import EagleModel
from specdec.models.eagle3 import Eagle3Model
from specdec.models.loader import Checkpoint
from tests.models.eagle_reference import Reference, Spec, draft_ids, random_weights, write_head

EAGLE = Spec(method="eagle", draft_vocab=97, taps=())
EAGLE3 = Spec()
SPECULATORS = replace(EAGLE3, is_speculators=True, has_tables=True)
SPECS = {
    "eagle": EAGLE,
    "eagle_bias": replace(EAGLE, has_bias=True),
    "eagle_own_tables": replace(EAGLE, has_tables=True),
    "eagle_two_layers": replace(EAGLE, num_layers=2),
    "eagle_prefixed": replace(EAGLE, has_tables=True, prefix="model."),
    "eagle_scaled": replace(EAGLE, extra={"logit_scale": 0.25}),
    "eagle3": EAGLE3,
    "eagle3_whole_vocabulary": replace(EAGLE3, draft_vocab=97),
    "eagle3_norm_before_fc": replace(EAGLE3, norm_before_fc=True),
    "eagle3_1": replace(EAGLE3, fc_norm=True, norm_output=True),
    "eagle3_1_residual": replace(EAGLE3, fc_norm=True, norm_output=True, norm_before_residual=True),
    "eagle3_bias": replace(EAGLE3, has_bias=True),
    "eagle3_qwen3": replace(EAGLE3, has_qk_norm=True, theta=1e6),
    "eagle3_two_layers": replace(EAGLE3, num_layers=2, has_qk_norm=True),
    "eagle3_narrow": replace(EAGLE3, width=16, head_dim=4, has_tables=True),
    "eagle3_one_state": replace(EAGLE3, taps=(1,)),
    "eagle3_last_state": replace(EAGLE3, taps=()),
    "eagle3_prefixed": replace(EAGLE3, prefix="model.", has_tables=True),
    "speculators": SPECULATORS,
    "speculators_residual": replace(SPECULATORS, norm_before_residual=True),
    "speculators_3_1": replace(SPECULATORS, fc_norm=True, norm_output=True),
    "speculators_qwen3": replace(SPECULATORS, has_qk_norm=True, head_dim=16),
}


class Target:
    """Tables of a target that lends them."""

    def __init__(self, *, vocab: int = 97, width: int = 32) -> None:
        generator = torch.Generator().manual_seed(9)
        self.embedding = torch.randn(vocab, width, generator=generator)
        self.lm_head = 0.2 * torch.randn(vocab, width, generator=generator)

    def embed_tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[input_ids]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.lm_head.T


def taps_of(spec: Spec) -> tuple[Tap, ...]:
    return spec.taps or (FINAL_NORM,)


def load(path: Path, spec: Spec, **changes: Any) -> DraftHead:
    """Load as the server does."""
    config = draft_hf_config(str(path), flatten(json.loads((path / "config.json").read_text())))
    setting = HeadSetting(
        **{
            "dtype": torch.float32,
            "device": torch.device("cpu"),
            "max_model_len": 64,
            "taps": taps_of(spec),
            "target_width": spec.target_width,
            "vocab_size": spec.vocab,
            **changes,
        }
    )
    with Checkpoint(str(path)) as checkpoint:
        head = (EagleModel if spec.method == "eagle" else Eagle3Model)(config, checkpoint, setting)
        checkpoint.finish()
    head.attach(Target())
    return head


class PagedHead:
    """Feeds one request's rows over blocks that are handed out from the last to the first."""

    def __init__(self, head: DraftHead) -> None:
        self.head, self.size = head, 4
        self.blocks = torch.arange(15, -1, -1, dtype=torch.int32)[None]
        self.kv = [pair for _ in range(head.num_layers) for pair in allocate_kv(1, (16, 4, *head.kv_shape()), **PLACE)]

    def feed(self, token_ids: list[int], features: torch.Tensor, *, start: int) -> HeadStates:
        at = torch.arange(start, start + len(token_ids))
        meta = AttentionMetadata(
            cu_query_lens=torch.tensor([0, len(at)], dtype=torch.int32),
            seq_lens=torch.tensor([start + len(at)], dtype=torch.int32),
            block_table=self.blocks,
            slot_mapping=self.blocks[0, at // self.size].long() * self.size + at % self.size,
            query_lens_cpu=(len(at),),
            seq_lens_cpu=(start + len(at),),
        )
        return self.head.forward(torch.tensor(token_ids), features, at, self.kv, meta)


PLACE: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}


def states_of(spec: Spec, length: int) -> dict[Tap, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {tap: torch.randn(length, spec.target_width, generator=generator) for tap in taps_of(spec)}


@torch.inference_mode()
@pytest.mark.parametrize("name", SPECS)
def test_logits_of_prompt_and_chain_equal_the_reference(tmp_path: Path, name: str) -> None:
    spec, target = SPECS[name], Target()
    weights = random_weights(spec, seed=3)
    path = write_head(tmp_path / "head", spec, weights, seed=3)
    head = load(path, spec)
    reference = Reference(spec, weights, target.embedding, target.lm_head, logit_scale=spec.extra.get("logit_scale", 1.0))
    tokens = torch.randint(0, spec.vocab, (23,), generator=torch.Generator().manual_seed(1)).tolist()
    states = states_of(spec, len(tokens))
    features = head.combine(states)
    assert torch.allclose(features, reference.features(list(states.values())), atol=1e-4)

    paged = PagedHead(head)
    parts = [paged.feed(tokens[start:stop], features[start:stop], start=start) for start, stop in ((0, 9), (9, 10), (10, 23))]
    given = head.compute_logits(torch.cat([part.scored for part in parts]))
    wanted = reference.logits(reference.rows(torch.tensor(tokens), features)[0])
    assert given.shape == wanted.shape == (23, spec.draft_vocab)
    assert float(wanted.std()) > 0.3, "logits that hardly differ show little"
    assert torch.allclose(given, wanted, atol=1e-4, rtol=1e-4)

    ids = None if head.id_map is None else head.id_map.tolist()
    drafts, rows = reference.chain(tokens, features, 4, to_target=lambda index: index if ids is None else ids[index])
    fed = parts[-1].fed_back[-1:]
    for depth, draft in enumerate(drafts[:-1]):
        step = paged.feed([draft], fed, start=len(tokens) + depth)
        assert torch.allclose(head.compute_logits(step.scored)[0], rows[depth + 1], atol=1e-4, rtol=1e-4)
        fed = step.fed_back


def test_a_reduced_vocabulary_maps_to_target_ids(tmp_path: Path) -> None:
    head = load(write_head(tmp_path / "head", EAGLE3, seed=5), EAGLE3)
    assert head.id_map is not None
    assert head.id_map.tolist() == draft_ids(EAGLE3, seed=5).tolist()
    only_mask = load(write_head(tmp_path / "mask", EAGLE3, seed=5, drop=["d2t"]), EAGLE3)
    assert only_mask.id_map is not None
    assert only_mask.id_map.tolist() == head.id_map.tolist()
    whole = replace(EAGLE3, draft_vocab=97)
    assert load(write_head(tmp_path / "whole", whole), whole).id_map is None


def test_weights_that_the_target_lends_are_not_counted(tmp_path: Path) -> None:
    lent, own = (load(write_head(tmp_path / str(has), spec), spec) for has in (False, True) for spec in (replace(EAGLE, has_tables=has),))
    assert own.num_bytes - lent.num_bytes == 2 * 97 * 32 * 4
    assert own.kv_shape() == lent.kv_shape() == (2, 8)


# name -> (head, change of its tensors, words of the error)
BROKEN_TENSORS: dict[str, tuple[Spec, Any, tuple[str, ...]]] = {
    "no fc": (EAGLE, {"fc.weight": None}, ("`fc.weight` is missing",)),
    "no post norm": (EAGLE3, {"midlayer.post_attention_layernorm.weight": None}, ("`midlayer.post_attention_layernorm.weight`", "missing")),
    "no lm head": (EAGLE3, {"lm_head.weight": None}, ("`lm_head.weight` is missing",)),
    "no map": (EAGLE3, {"d2t": None, "t2d": None}, ("`d2t` is missing",)),
    "surplus": (EAGLE, {"layers.0.input_layernorm.weight": torch.ones(32)}, ("unexpected tensor `layers.0.input_layernorm.weight`",)),
    "surplus norm": (EAGLE3, {"fc_norm.0.weight": torch.ones(32)}, ("unexpected tensor `fc_norm.0.weight`",)),
    "other layers": (EAGLE3, {"fc.weight": torch.ones(32, 64)}, ("`fc.weight`", "[32, 64]", "[32, 96]")),
    "other vocabulary": (EAGLE3, {"lm_head.weight": torch.ones(30, 32)}, ("`lm_head.weight`", "[30, 32]", "[40, 32]")),
    "map leaves": (EAGLE3, {"d2t": torch.arange(40) * 0 + 80}, ("draft id 17 to target id 97", "0 to 96")),
    "map of ids": (EAGLE3, {"d2t": torch.tensor([3, 2, *[0] * 38])}, ("several draft ids to target id 3",)),
    "mask of another size": (EAGLE3, {"d2t": None, "t2d": torch.ones(97, dtype=torch.bool)}, ("t2d marks 97", "draft_vocab_size is 40")),
}


@pytest.mark.parametrize("case", BROKEN_TENSORS)
def test_a_checkpoint_with_other_tensors_is_refused_by_name(tmp_path: Path, case: str) -> None:
    spec, changes, words = BROKEN_TENSORS[case]
    file = write_head(tmp_path / "head", spec) / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "head", spec)
    for word in words:
        assert word in caught.value.message


BROKEN_CONFIGS: dict[str, tuple[Spec, dict[str, Any], tuple[str, ...]]] = {
    "activation": (EAGLE3, {"hidden_act": "gelu"}, ("hidden_act is 'gelu'",)),
    "quantised": (EAGLE, {"quantization_config": {"quant_method": "fp8"}}, ("quantization_config",)),
    "no sizes": (EAGLE3, {"model_type": "unheard-of", "rms_norm_eps": None}, ("no rms_norm_eps",)),
    "states": (EAGLE3, {"num_aux_hidden_states": 2}, ("num_aux_hidden_states is 2", "[0, 1, 2]")),
    "both norms": (EAGLE3, {"norm_before_fc": True, "fc_norm": True}, ("norm_before_fc and fc_norm",)),
    "rope": (EAGLE3, {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}},
             ("longrope",)),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN_CONFIGS)
def test_a_config_that_heads_cannot_honour_is_refused(tmp_path: Path, case: str) -> None:
    spec, keys, words = BROKEN_CONFIGS[case]
    write_head(tmp_path / "head", replace(spec, extra=keys))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "head", spec)
    for word in words:
        assert word in caught.value.message


def test_another_target_is_refused_with_both_numbers(tmp_path: Path) -> None:
    write_head(tmp_path / "head", EAGLE)
    with pytest.raises(ConfigError, match="draft hidden size 32 differs from target hidden size 48"):
        load(tmp_path / "head", EAGLE, target_width=48)
    with pytest.raises(ConfigError, match="draft vocabulary 97 differs from target vocabulary 101"):
        load(tmp_path / "head", EAGLE, vocab_size=101)
    write_head(tmp_path / "wide", EAGLE3)
    with pytest.raises(ConfigError, match=r"`embed_tokens\.weight` is missing"):
        load(tmp_path / "wide", EAGLE3, target_width=48)  # it cannot borrow an embedding of another width


@pytest.fixture
def package_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The package's warnings, whatever an earlier test made of its loggers."""
    monkeypatch.setattr(logging.getLogger("specdec"), "propagate", True)
    return caplog


def test_what_only_a_parallel_drafter_needs_is_left_out_aloud(tmp_path: Path, package_log: pytest.LogCaptureFixture) -> None:
    weights = random_weights(EAGLE3) | {"mask_hidden": torch.ones(96)}
    load(write_head(tmp_path / "head", EAGLE3, weights), EAGLE3)
    assert "mask_hidden" in package_log.text


def test_maps_that_disagree_are_named(tmp_path: Path, package_log: pytest.LogCaptureFixture) -> None:
    file = write_head(tmp_path / "head", EAGLE3) / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "t2d": ~tensors["t2d"]}, file)
    assert load(tmp_path / "head", EAGLE3).id_map is not None
    assert "t2d and d2t" in package_log.text
