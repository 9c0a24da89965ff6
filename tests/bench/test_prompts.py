"""The workloads: enough prompts, all different, the same each time, warm-up apart, copies long enough."""

from __future__ import annotations

import pytest

from specdec.errors import ConfigError
from specdec.tools.prompts import MAX_WORDS, MIN_WORDS, TOPICS, WORKLOADS, Workload, num_prompts, prompts_for, warmup_prompts

NUM_CHAT = num_prompts("chat")


def test_there_are_enough_prompts() -> None:
    assert len(TOPICS) >= 40
    assert NUM_CHAT >= 1300, "a dozen pairs at 1 to 32 requests in flight"
    assert num_prompts("copy") >= 80


def test_the_prompts_of_earlier_results_keep_their_places() -> None:
    first, *_, last = prompts_for("chat", 384)
    assert first == "Give me a plan, week by week, for getting to know learning Spanish in one month."
    assert last == "Explain cooking rice to someone who has never heard about it."


@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_prompt_comes_twice_and_warm_up_is_apart(workload: Workload) -> None:
    count = num_prompts(workload)
    prompts = prompts_for(workload, count)
    warm = warmup_prompts(workload, 32)
    assert len(set(prompts)) == count
    assert len(set(warm)) == 32
    assert not set(prompts) & set(warm)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_skipping_continues_the_same_order(workload: Workload) -> None:
    assert prompts_for(workload, 6)[2:] == prompts_for(workload, 4, skip=2)


def test_copy_prompts_hold_a_text_of_the_stated_length() -> None:
    for prompt in prompts_for("copy", 200):
        text = prompt.partition("\n\n")[2].replace("```python", "").replace("```", "")
        assert MIN_WORDS <= len(text.split()) <= MAX_WORDS


def test_edits_have_something_to_edit() -> None:
    for index, prompt in enumerate(prompts_for("copy", 80)):
        instruction, _, text = prompt.partition("\n\n")
        if index % 4 == 2:
            assert instruction.split()[3] in text
        if index % 4 == 3:
            name = instruction.split("`")[1]
            assert text.count(name) > 3
            compile(text.removeprefix("```python\n").removesuffix("\n```"), "prompt", "exec")


def test_asking_for_too_many_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=f"10 prompts after {NUM_CHAT - 5} are asked for, but chat has {NUM_CHAT}"):
        prompts_for("chat", 10, skip=NUM_CHAT - 5)
