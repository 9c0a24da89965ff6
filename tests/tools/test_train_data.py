"""Texts to train on: kept as asked for, never asked twice, apart from the prompts that are measured with."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from specdec import LLM
from specdec.tools import prompts, train_data
from specdec.tools.train_data import Report, ends_in_loop, write_data
from specdec.tools.train_prompts import TEMPLATES, TOPICS, built_in_prompts
from specdec.train.shards import Corpus


def test_what_is_trained_on_is_not_measured_with() -> None:
    assert not set(TOPICS) & set(prompts.TOPICS)
    assert not set(TEMPLATES) & set(prompts.QUESTIONS)
    assert not set(islice(built_in_prompts(1), 5000)) & set(prompts.prompts_for("chat", 300))


def test_a_seed_fixes_the_prompts_and_they_vary() -> None:
    first = list(islice(built_in_prompts(3), 300))
    assert first == list(islice(built_in_prompts(3), 300))
    assert first != list(islice(built_in_prompts(4), 300))
    assert len(set(first)) > 280


def test_loops_are_seen_by_their_period() -> None:
    assert ends_in_loop([*range(50), *[1, 2, 3] * 22])
    assert not ends_in_loop(list(range(80)))
    assert not ends_in_loop([1] * 20)  # too short to tell


def test_the_embedded_model_writes_shards_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_data, "PER_SHARD", 6)
    monkeypatch.setattr(train_data, "MAX_ANSWER", 24)
    reports: list[Report] = []
    with LLM(speculative_config=None, max_model_len=512, max_num_seqs=8) as llm:
        total = write_data(llm, tmp_path, num_tokens=60, show=reports.append)
        assert total >= 60
        again = write_data(llm, tmp_path, num_tokens=total + 1, show=reports.append)
        text = llm.tokenizer.decode(Corpus(tmp_path, features=False).documents("train")[0].ids.tolist(), skip_special_tokens=False)
    assert again > total
    assert reports[-1].num_tokens == again
    documents = Corpus(tmp_path, features=False).documents("train")
    assert sum(len(document.ids) - document.prompt_len for document in documents) == again
    assert len({tuple(document.ids[: document.prompt_len].tolist()) for document in documents}) == len(documents)
    assert "<|im_start|>user\n" in text
    assert text.count("<|im_start|>assistant\n") == 1
