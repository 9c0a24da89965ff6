"""A tiny target, easily learnt, and texts that it wrote greedily."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specdec.models.registry import TargetModel, load_model
from specdec.train.features import make_features, taps_of
from specdec.train.run import TargetTables
from specdec.train.shards import Document, write_shard
from tests.proposers.heads import write_teachable

LENGTH = 48
TAPS = taps_of(4)


@dataclass(frozen=True, slots=True)
class Taught:
    """The target's directory, the directory of its texts, what a head borrows, the target in transformers and as it is served."""

    target: Path
    data: Path
    tables: TargetTables
    model: Any
    served: TargetModel


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Taught:
    target = write_teachable(tmp_path_factory.mktemp("teachable"))
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # its texts go on, as the tests' requests do
    generator, documents = torch.Generator().manual_seed(5), []
    for _ in range(60):
        prompt = torch.randint(1, 90, (1, 6), generator=generator)
        ids = model.generate(prompt, do_sample=False, max_new_tokens=LENGTH - 6, pad_token_id=0)[0]
        documents.append(Document(ids=ids, prompt_len=6, temperature=0.0))
    data = tmp_path_factory.mktemp("data")
    write_shard(data / "shard-00000.safetensors", documents, vocab_size=97)
    served = load_model(str(target), model.config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=128)
    assert make_features(data, served, TAPS) == 1
    return Taught(target, data, TargetTables.load(str(target), model.config), model, served)
