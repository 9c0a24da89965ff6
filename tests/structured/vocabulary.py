"""A small byte-level tokenizer that can spell JSON, and a random target over it whose texts end soon enough."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.config.engine import CacheConfig, EngineConfig, ResolvedConfig, SchedulerConfig
from specdec.config.methods import MethodTraits
from specdec.engine.tokenizer import Tokenizer

_WORDS = ('{"', '"}', '":', '": ', ', "', '",', "[]", "{}", "true", "null", "false", "ab", "id", "name", "\n\n", "12", "20", "00")
_SPECIAL = ("<eos>", "<tool>")


def json_tokenizer() -> Tokenizer:
    """All 256 bytes, some longer tokens across the borders of JSON, an end token, and a special token with text."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocab = {char: index for index, char in enumerate(sorted(alphabet))}
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    backend.add_tokens([AddedToken(word, special=False, normalized=False) for word in _WORDS])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"))


VOCAB_SIZE = 256 + len(_SPECIAL) + len(_WORDS) + 10  # the embedding is padded
EOS, TOOL = 256, 257


def write_target(path: Path, *, seed: int = 1, vocab_size: int = VOCAB_SIZE, eos_token_id: int = EOS) -> Path:
    """Write a random Llama checkpoint whose output is varied."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(path)
    return path


def resolved_for(
    path: Path, *, traits: MethodTraits | None = None, speculative: object = None, num_blocks: int = 400, **scheduler: object
) -> ResolvedConfig:
    """The resolved configuration of a checkpoint of `write_target`; `scheduler` are fields of SchedulerConfig."""
    hf_config = LlamaConfig.from_pretrained(path)
    return ResolvedConfig(
        engine=EngineConfig(
            cache=CacheConfig(block_size=8, num_blocks=num_blocks),
            scheduler=SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 256, "async_scheduling": False} | scheduler),
            speculative=speculative,
        ),
        model_path=str(path),
        tokenizer_path=str(path),
        hf_config=hf_config,
        dtype="float32",
        device="cpu",
        max_model_len=400,
        vocab_size=hf_config.vocab_size,
        eos_token_ids=(hf_config.eos_token_id,),
        served_model_name="tiny",
        traits=traits,
    )
