"""What HfModel refuses, and that its trial at load sees an attention that is not the model's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from specdec.errors import ConfigError
from specdec.models.hf import ATTENTION, HfModel, attend_paged
from specdec.models.registry import load_model
from tests.models.paged import PagedRun
from tests.models.tiny import oracle_logits, random_prompt, read_config, save_random, saved, tiny_config

Attention = Callable[..., Any]
_MLA = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "num_key_value_heads": 4,
    "v_head_dim": 6,
}
_DYNAMIC = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}

# name -> (model type, changes, what the message says)
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "recurrent": ("mamba", {"state_size": 4}, "MambaForCausalLM keeps recurrent state"),
    "recurrent beside attention": ("falcon_h1", {}, "FalconH1ForCausalLM keeps recurrent state"),
    "own attention code": ("bloom", {"n_head": 4, "n_layer": 2}, "BloomForCausalLM does not run its attention through"),
    "capped scores": ("gemma2", {"head_dim": 16}, r"Gemma2ForCausalLM hands its attention `softcap` 50\.0"),
    "sinks": ("gpt_oss", {"head_dim": 8, "num_local_experts": 4}, "GptOssForCausalLM hands its attention `s_aux`"),
    "chunked layers": ("llama4_text", {"head_dim": 8, "num_local_experts": 2}, "layers of type 'chunked_attention'"),
    "convolutions": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "layers of type 'conv'"),
    "two attentions": ("diffllama", {}, "layer 0 of DiffLlamaForCausalLM attends more than once"),
    "values of another size": ("deepseek_v3", _MLA, "keys of 8 and values of 6 numbers"),
    "angles that grow": (
        "llama",
        {"rope_parameters": _DYNAMIC, "max_position_embeddings": 32},
        "rope_type 'dynamic', whose angles change past 32",
    ),
}


def load(path: Path, *, max_model_len: int = 64) -> HfModel:
    model = load_model(str(path), read_config(path), dtype=torch.float32, device=torch.device("cpu"), max_model_len=max_model_len)
    assert isinstance(model, HfModel)
    return model


@pytest.mark.filterwarnings("ignore")  # advice of libraries about models that are refused anyway
@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_model_and_rule(tmp_path: Path, case: str) -> None:
    model_type, changes, message = REFUSED[case]
    save_random(tiny_config(model_type, **changes), tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path)
    assert caught.value.hint


def test_growing_angles_are_served_where_they_do_not_grow(tmp_path: Path) -> None:
    oracle = save_random(tiny_config("llama", rope_parameters=_DYNAMIC, max_position_embeddings=32), tmp_path)
    ids = random_prompt(30, seed=1)
    logits = PagedRun(load(tmp_path, max_model_len=32)).feed({0: ids})[0]
    torch.testing.assert_close(logits, oracle_logits(oracle, ids), rtol=0, atol=1e-4)


def test_a_config_without_causal_model_is_refused(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("vit", vocab_size=9)
    with pytest.raises(ConfigError, match="model type 'vit' cannot be built"):
        load_model(str(tmp_path), config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)


def other_scale(*args: Any, scaling: float, **kwargs: Any) -> Any:
    return attend_paged(*args, scaling=scaling * 1.1, **kwargs)


def forgets_the_past(module: Any, query: Any, key: Any, value: Any, mask: Any = None, **kwargs: Any) -> Any:
    """Every chunk starts from an empty cache: what a model with state outside the cache looks like."""
    step = module.specdec_holder.step
    for cache in step.kv.get(module.layer_idx, ()):
        cache.zero_()
    return attend_paged(module, query, key, value, mask, **kwargs)


def loses_the_window(*args: Any, sliding_window: int | None = None, **kwargs: Any) -> Any:
    return attend_paged(*args, **kwargs)


def adds_a_bias(*args: Any, **kwargs: Any) -> Any:
    return attend_paged(*args, position_bias=torch.zeros(1), **kwargs)


def skips_a_layer(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
    if module.layer_idx == 1:
        return query.transpose(1, 2), None
    return attend_paged(module, query, *args, **kwargs)


def other_heads(module: Any, query: Any, key: Any, value: Any, mask: Any = None, **kwargs: Any) -> Any:
    if module.layer_idx == 2:
        key, value = key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1)
    return attend_paged(module, query, key, value, mask, **kwargs)


@pytest.mark.parametrize(
    ("tampered", "message"),
    [
        (other_scale, "over the paged cache differs from its own attention"),
        (forgets_the_past, "over the paged cache differs from its own attention"),
        (loses_the_window, "has sliding_window 5, but does not hand it"),
        (adds_a_bias, "hands its attention `position_bias`, which"),
        (skips_a_layer, "layer 1 of .* does not attend through"),
        (other_heads, "layer 2 of .* has 4 KV heads of 16, layer 0 has 2 of 16"),
    ],
)
def test_the_trial_sees_a_wrong_attention(tmp_path: Path, tampered: Attention, message: str) -> None:
    saved("gemma3_two_windows", tmp_path)
    load(tmp_path)
    transformers.AttentionInterface.register(ATTENTION, tampered)
    try:
        with pytest.raises(ConfigError, match=message):
            load(tmp_path)
    finally:
        transformers.AttentionInterface.register(ATTENTION, attend_paged)


def test_logits_that_the_config_scales_in_an_unknown_way_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("granite_scaled_logits", tmp_path)
    load(tmp_path)
    monkeypatch.setattr(HfModel, "compute_logits", lambda self, hidden: self.head(hidden).float())
    with pytest.raises(ConfigError, match="differs from its own attention"):
        load(tmp_path)


def test_two_models_in_one_process_do_not_share_a_step(tmp_path: Path) -> None:
    pairs = []
    for name in ("gpt2_learned_positions", "gemma_scaled_embedding"):
        path = tmp_path / name
        oracle = saved(name, path)
        pairs.append((PagedRun(load(path)), oracle))
    ids = random_prompt(12, seed=2)
    got: list[list[torch.Tensor]] = [[], []]
    for start in range(0, 12, 4):
        for (run, _), parts in zip(pairs, got, strict=True):
            parts.append(run.feed({0: ids[start : start + 4]})[0])
    for (_, oracle), parts in zip(pairs, got, strict=True):
        torch.testing.assert_close(torch.cat(parts), oracle_logits(oracle, ids), rtol=0, atol=1e-4)


def test_a_final_norm_that_is_no_module_is_refused_only_when_asked_for(tmp_path: Path) -> None:
    changes = {
        "head_dim": 8,
        "sliding_window": 8,
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0, 0.0],
    }
    save_random(tiny_config("gemma3n_text", **changes), tmp_path)
    model = load(tmp_path)
    PagedRun(model).feed({0: [3, 4, 5]})
    with pytest.raises(ConfigError, match="final norm of Gemma3nForCausalLM could not be told apart"):
        model.final_norm(torch.zeros(1, 32))
