"""Texts to train on: what the target says to each prompt, kept as asked for, never asked twice, apart from what is measured with."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.engine.core import EngineCore
from specdec.engine.llm import LLM
from specdec.errors import ConfigError
from specdec.sampling_params import SamplingParams
from specdec.tools import prompts, train_data, train_passages
from specdec.tools.train_data import DataOptions, Report, ends_in_loop, write_data
from specdec.tools.train_prompts import FOLLOW_UPS, TEMPLATES, TOPICS, Turn, built_in_prompts
from specdec.tools.train_sources import FileSource, Frame, OwnSource, key_of
from specdec.train.shards import Corpus, read_origin, shard_paths
from tests.engine.tokenizers_for_tests import TOY_EOS, toy_tokenizer
from tests.toy import Target, ToyRunner, coin, hash_target, scripted_target, toy_resolved

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}#{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture
def engine() -> Iterator[tuple[LLM, ToyRunner]]:
    """A chat model whose answer is a hash of everything before it, and whose runner can be asked for it alone."""
    llm, runner = _made(hash_target(eos_token_id=TOY_EOS, eos_rate=0.08))
    with llm:
        yield llm, runner


def _engine(target: Target, template: str = TEMPLATE) -> LLM:
    return _made(target, template)[0]


def _made(target: Target, template: str = TEMPLATE) -> tuple[LLM, ToyRunner]:
    resolved = toy_resolved(
        num_drafts=3, max_model_len=512, num_blocks=4096, max_num_seqs=8, max_num_batched_tokens=512, eos_token_ids=(TOY_EOS,)
    )
    runner = ToyRunner.for_config(resolved, drafter=coin(0.6, vocab_size=resolved.vocab_size), target=target)
    tokenizer = toy_tokenizer()
    tokenizer.hf.chat_template = template
    return LLM.from_core(EngineCore(resolved, runner, tokenizer=tokenizer)), runner


def _write(llm: LLM, out: Path, source: Any, num_tokens: int, *, fingerprint: str = "aa", **more: Any) -> int:
    options = DataOptions(num_tokens=num_tokens, answer_tokens=40)
    return write_data(llm, out, source, fingerprint=fingerprint, options=options, **more)


def _file(path: Path, *lines: str) -> FileSource:
    path.write_text("\n".join(lines), encoding="utf-8")
    return FileSource(str(path))


def _user(text: str) -> tuple[Turn, ...]:
    return (Turn("user", text),)


# -- prompts -------------------------------------------------------------------------------------------------------------


def test_what_is_trained_on_is_not_measured_with() -> None:
    measured = set(prompts.prompts_for("chat", prompts.num_prompts("chat"))) | set(prompts.prompts_for("copy", 200))
    assert not set(TOPICS) & {*prompts.TOPICS, *prompts.WARMUP_TOPICS}
    assert not set(TEMPLATES) & set(prompts.QUESTIONS)
    told = [turn.content for talk in islice(built_in_prompts(1), 5000) for turn in talk]
    assert not set(told) & measured
    openings = {question.partition("{}")[0] for question in prompts.QUESTIONS} - {"", "Explain "}
    copies = {prompt.partition(":")[0][:30] for prompt in measured if "\n\n" in prompt}
    assert not [text for text in told if any(text.startswith(opening) for opening in openings | copies)]
    assert not set(train_passages.PEOPLE) & set(prompts.NAMES)


def test_a_seed_fixes_the_prompts_and_they_vary() -> None:
    first = list(islice(built_in_prompts(3), 400))
    assert first == list(islice(built_in_prompts(3), 400))
    assert first != list(islice(built_in_prompts(4), 400))
    assert len(set(first)) > 370
    assert all(talk[-1].role == "user" and talk[-1].content for talk in first)
    assert not [talk for talk in first for turn in talk if "{" in turn.content.replace("{}", "") and "JSON" not in turn.content]
    assert {len(talk) for talk in first} == {1, 2}
    assert {len(talk) for talk in islice(built_in_prompts(3, system=False), 400)} == {1}


def test_texts_of_the_targets_own_are_asked_about() -> None:
    told = [talk[-1].content for talk in islice(built_in_prompts(5, passages=["PASSAGE ONE", "PASSAGE TWO"]), 600)]
    about = [text for text in told if text.endswith(("\n\nPASSAGE ONE", "\n\nPASSAGE TWO"))]
    assert 0.05 < len(about) / len(told) < 0.2
    assert {text.partition("\n\n")[0] for text in about} <= set(train_passages.TEXT_TASKS)


def test_a_file_is_asked_in_order_and_once(tmp_path: Path) -> None:
    source = _file(tmp_path / "p.txt", "one", "", "  two ", "one", "three")
    rng = random.Random(0)
    first = source.take(2, asked=set(), passages=(), rng=rng)
    assert first == [_user("one"), _user("two")]
    assert source.take(9, asked=set(map(key_of, first)), passages=(), rng=rng) == [_user("three")]
    assert source.name.startswith("p.txt sha256:")


def test_a_file_of_messages_holds_whole_conversations(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    turns.append({"role": "user", "content": "c"})
    source = _file(tmp_path / "p.jsonl", json.dumps({"messages": turns, "id": 7}), json.dumps({"prompt": "alone"}))
    talks = source.take(9, asked=set(), passages=(), rng=random.Random(0))
    assert [[(turn.role, turn.content) for turn in talk] for talk in talks] == [
        [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")],
        [("user", "alone")],
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of --prompts .* is no JSON"),
        ("[1]", "line 2 .* holds no messages"),
        ('{"messages": []}', "does not end with a message of the user"),
        ('{"messages": [{"role": "user"}]}', "holds no messages with a role and a text"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "does not end with a message of the user",
        ),
        ('{"prompt": 3}', "holds no messages"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _file(tmp_path / "p.jsonl", '{"prompt": "fine"}', line)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        FileSource(str(tmp_path / "none.txt"))
    with pytest.raises(ConfigError, match="holds no prompt"):
        _file(tmp_path / "p.txt", "", "  ")


# -- answers -------------------------------------------------------------------------------------------------------------


def test_documents_are_what_the_target_says_alone(engine: tuple[LLM, ToyRunner], tmp_path: Path) -> None:
    """Against the same model asked without batch, cache or drafts, with the temperature and seed that the shard names."""
    llm, runner = engine
    lines = [f"prompt {number}" for number in range(30)]
    shown: list[Report] = []
    total = _write(llm, tmp_path / "out", _file(tmp_path / "p.txt", *lines), 10**6, show=shown.append)
    (shard,) = shard_paths(tmp_path / "out")
    corpus = Corpus(tmp_path / "out", features=False)
    documents = [*corpus.documents("train"), *corpus.documents("eval")]
    prompts_kept = []
    for document in documents:
        ids = document.ids.tolist()
        prompt, answer = ids[: document.prompt_len], ids[document.prompt_len :]
        params = SamplingParams(temperature=document.temperature, seed=document.seed, max_tokens=40)
        assert answer == runner.solo(prompt, params)[0]
        assert document.loss_mask.tolist() == [False] * len(prompt) + [True] * len(answer)
        assert answer[-1] == TOY_EOS or len(answer) == 40
        prompts_kept.append(llm.tokenizer.decode(prompt))
    assert sum(document.ids[-1] == TOY_EOS for document in documents) > 5
    silent = [line for line in lines if not runner.solo(llm.tokenizer.encode(f"<user>{line}#<assistant>"), SamplingParams())[0][1:]]
    assert 0 < len(silent) < 6  # nothing but the end of the turn: there is nothing to learn
    assert prompts_kept == [f"<user>{line}#<assistant>" for line in lines if line not in silent]
    assert 0.1 < sum(document.temperature == 0 for document in documents) / len(documents) < 0.8
    assert total == sum(int(document.loss_mask.sum()) for document in documents)
    assert [(report.kept, report.asked, report.num_tokens) for report in shown] == [(len(documents), 30, total)]
    origin = read_origin(shard)
    assert origin is not None
    assert (origin.model, origin.asked) == ("aa", tuple(key_of(_user(line)) for line in lines))


def test_a_stopped_run_goes_on_and_asks_nothing_twice(
    engine: tuple[LLM, ToyRunner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_data, "PER_SHARD", 7)
    llm, _ = engine
    lines = [f"prompt {number}" for number in range(20)]
    whole = _write(llm, tmp_path / "whole", _file(tmp_path / "p.txt", *lines), 10**6)

    def stop(report: Report) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            _write(llm, tmp_path / "parts", FileSource(str(tmp_path / "p.txt")), 10**6, show=stop)
    assert _write(llm, tmp_path / "parts", FileSource(str(tmp_path / "p.txt")), 10**6) == whole
    for one, other in zip(shard_paths(tmp_path / "whole"), shard_paths(tmp_path / "parts"), strict=True):
        assert one.read_bytes() == other.read_bytes()
    manifest = json.loads((tmp_path / "parts" / "manifest.json").read_text())
    assert (manifest["documents"], manifest["asked"], manifest["answer_tokens"], manifest["model"]) == (18, 20, whole, ["aa"])
    assert [row["name"] for row in manifest["shards"]] == [f"shard-{n:05d}.safetensors" for n in range(3)]
    assert len({row["sha256"] for row in manifest["shards"]}) == 3


def test_self_written_prompts_and_second_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_data, "PER_SHARD", 30)
    opening, own = toy_tokenizer().encode("<user>"), toy_tokenizer().encode("How do magpies sing?#")
    answer = hash_target(92, eos_token_id=TOY_EOS, eos_rate=0.02)  # whole characters only

    def target(history: Sequence[int], num_prompt: int) -> int:
        at = len(history) - len(opening)
        return own[at] if num_prompt == len(opening) and at < len(own) else answer(history, num_prompt)

    with _engine(target) as llm:
        frame = Frame(llm.tokenizer)
        assert (frame.opening, frame.end_of_turn) == (opening, own[-1])
        _write(llm, tmp_path, OwnSource(llm, frame), 1500)
    assert len(shard_paths(tmp_path)) >= 2
    documents = Corpus(tmp_path, features=False).documents("train")
    told = {_text(llm, document.ids[: document.prompt_len]): _text(llm, document.ids[document.prompt_len :]) for document in documents}
    assert len(told) == len(documents)
    second = {text: first for text in told for first in told if text != first and text.startswith(f"{first}{told[first]}#<user>")}
    assert len(second) >= 3
    whole = {_text(llm, document.ids[: document.prompt_len]) for document in documents if document.ids[-1] == TOY_EOS}
    assert set(second.values()) <= whole < told.keys()  # an answer that was cut is not asked about
    for text, first in second.items():  # behind the model's own answer to the first question
        assert text.removeprefix(f"{first}{told[first]}#<user>").removesuffix("#<assistant>") in FOLLOW_UPS
    assert sum(text == "<user>How do magpies sing?#<assistant>" for text in told) == 1  # it always says the same, and is asked once


def test_a_self_written_prompt_that_is_measured_with_is_left_out() -> None:
    (measured,) = prompts.prompts_for("chat", 1)
    taken = []
    for text in (measured, f"{measured}!"):
        said = [*toy_tokenizer().encode(f"{text}#"), 1]
        with _engine(scripted_target(said)) as llm:
            source = OwnSource(llm, Frame(llm.tokenizer))
            taken.append([talk[-1].content for talk in source.take(4, asked=set(), passages=(), rng=random.Random(0))])
    assert measured not in taken[0]
    assert f"{measured}!" in taken[1]
    assert len(taken[0]) == len(taken[1]) == 4


def _text(llm: LLM, ids: torch.Tensor) -> str:
    return llm.tokenizer.decode(ids.tolist()).strip()


def test_loops_and_empty_answers_are_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ends_in_loop([*range(50), *[1, 2, 3] * 22])
    assert not ends_in_loop(list(range(80)))
    assert not ends_in_loop([1] * 20)  # too short to tell
    monkeypatch.setattr(train_data, "LOOP_TAIL", 20)
    monkeypatch.setattr(train_data, "PER_SHARD", 6)
    lines = [f"p{number}" for number in range(4)]
    for output in ([5, 6, 7], [TOY_EOS]):
        with _engine(scripted_target(output)) as llm:
            assert _write(llm, tmp_path / "out", _file(tmp_path / "p.txt", *lines), 100) == 0
            assert not shard_paths(tmp_path / "out")
            with pytest.raises(ConfigError, match="no usable answer"):
                _write(llm, tmp_path / "own", OwnSource(llm, Frame(llm.tokenizer)), 100)


def test_a_template_without_system_messages_gives_nobody_a_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_data, "PER_SHARD", 60)
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    with _engine(hash_target(eos_token_id=TOY_EOS, eos_rate=0.3), strict) as llm:
        assert not Frame(llm.tokenizer).takes_system
        assert _write(llm, tmp_path, OwnSource(llm, Frame(llm.tokenizer)), 100) >= 100
    with _engine(hash_target(), "{% for m in messages %}hello{% endfor %}") as llm, pytest.raises(ConfigError, match="does not show"):
        Frame(llm.tokenizer)
    with _engine(hash_target(), "") as llm, pytest.raises(ConfigError, match="no chat template"):
        Frame(llm.tokenizer)


def test_another_targets_directory_and_bad_sizes_are_refused(engine: tuple[LLM, ToyRunner], tmp_path: Path) -> None:
    llm, _ = engine
    _write(llm, tmp_path / "out", _file(tmp_path / "p.txt", "one", "two"), 10)
    with pytest.raises(ConfigError, match="written by another model"):
        _write(llm, tmp_path / "out", FileSource(str(tmp_path / "p.txt")), 10, fingerprint="bb")
    with pytest.raises(ConfigError, match="tokens is 0"):
        DataOptions(num_tokens=0)
    with pytest.raises(ConfigError, match="answer-tokens is 3"):
        DataOptions(num_tokens=10, answer_tokens=3)
