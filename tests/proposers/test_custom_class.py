"""custom_class: a user's class drafts like any method, and whatever it does wrong costs drafts, never a request."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import CustomClassConfig
from specdec.config.methods import traits_for
from specdec.errors import ConfigError
from specdec.proposers.base import Proposer, build_proposer
from specdec.proposers.custom_class import CustomClassProposer, build_custom
from specdec.proposers.host_child import Ask, Offer, TokenRows
from specdec.proposers.host_worker import Deadlines, HostWorker
from tests.proposers.scenarios import SCENARIOS, Scenario, check_lossless
from tests.proposers.tiny import mixed_requests, plain, resolved_for, start
from tests.proposers.user_device_classes import Lookup

CLASSES = "tests.proposers.user_classes"
PATIENT = Deadlines(step_s=20.0, hang_s=60.0)  # a busy machine must not look like a hanging class
HASTY = Deadlines(step_s=0.2, hang_s=0.4, first_step_s=0.4, pause_s=0.01, longest_pause_s=0.02)


def custom_resolved(path: Path, model: str, *, drafts: int = 3, **settings: object) -> ResolvedConfig:
    speculative = CustomClassConfig(model=model, num_speculative_tokens=drafts)
    return resolved_for(path, traits=traits_for(speculative), speculative=speculative, **settings)


@contextmanager
def custom(resolved: ResolvedConfig, deadlines: Deadlines = PATIENT) -> Iterator[CustomClassProposer]:
    proposer = build_custom(resolved, deadlines=deadlines)
    assert isinstance(proposer, CustomClassProposer)
    try:
        yield proposer
    finally:
        proposer.worker.close()


# A step in flight at a preemption is repeated, so that the class is told its tokens twice; Remembers takes that for an error.
CASES = [(s, name) for s in SCENARIOS for name in ("Repeats", "Remembers") if (s.name, name) != ("overlapped_preempting", "Remembers")]


@pytest.mark.parametrize(("scenario", "name"), [*CASES, (SCENARIOS[0], "ReturnsNumpy")], ids=lambda part: getattr(part, "name", part))
def test_ids_equal_plain_decoding(target_path: Path, scenario: Scenario, name: str) -> None:
    resolved = custom_resolved(target_path, f"{CLASSES}.{name}", **scenario.settings)
    with custom(resolved) as proposer:
        result = check_lossless(target_path, scenario, traits=resolved.traits, make=lambda _: proposer, build=lambda _: resolved)
        assert proposer.faults == {}
        assert proposer._texts == {}, "rows are forgotten when requests end"
    assert result.num_drafted() > 0
    assert {source for stats in result.stats.values() for source in stats.by_source} == {"custom_class"}


def test_the_class_drafts_what_it_would_draft_here(target_path: Path) -> None:
    """The same drafts as a proposer of this process with the same rule."""
    requests = mixed_requests()
    resolved = custom_resolved(target_path, f"{CLASSES}.Repeats")
    with custom(resolved) as proposer:
        there = start(resolved, lambda _: proposer)
        there.add(requests)
        there.finish()
    here = start(resolved, lambda _: Lookup(resolved))
    here.add(requests)
    here.finish()
    assert {name: (one.num_draft_tokens, one.num_accepted_tokens) for name, one in there.stats.items()} == {
        name: (one.num_draft_tokens, one.num_accepted_tokens) for name, one in here.stats.items()
    }


FAULTS = {
    "Raises": "exception",
    "Exits": "exception",
    "ReturnsNone": "bad_reply",
    "ReturnsShort": "bad_reply",
    "ReturnsStrings": "bad_reply",
    "ReturnsFloats": "bad_reply",
    "ReturnsOutside": "bad_reply",
    "ReturnsNegative": "bad_reply",
    "ReturnsLong": "bad_reply",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_answer_costs_the_drafts_of_its_step(target_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    requests = mixed_requests(3, max_tokens=14)
    with custom(custom_resolved(target_path, f"{CLASSES}.{name}")) as proposer:
        running = start(custom_resolved(target_path, f"{CLASSES}.{name}"), lambda _: proposer)
        running.add(requests)
        result = running.finish()
        assert set(proposer.faults) == {FAULTS[name]}
        assert proposer.worker.generation == 1, "the process went on"
    assert result.token_ids == plain(target_path, requests)
    assert result.num_drafted() > 0, "later answers count again"
    assert len([record for record in caplog.records if "custom proposer class" in record.message]) == 1


@pytest.mark.parametrize(("name", "kinds"), [("Dies", {"crash"}), ("HangsFirst", {"late", "hang"}), ("HangsLater", {"late", "hang"})])
def test_a_process_that_dies_or_hangs_is_started_again(target_path: Path, name: str, kinds: set[str]) -> None:
    """Each process answers two calls and then fails, or none; requests come until one has been started again and has failed too."""
    resolved = custom_resolved(target_path, f"{CLASSES}.{name}")
    with custom(resolved, replace(HASTY, step_s=20.0) if kinds == {"crash"} else HASTY) as proposer:
        running = start(resolved, lambda _: proposer)
        until = time.monotonic() + 60
        while proposer.worker.generation < 3:
            assert time.monotonic() < until, f"{proposer.faults} after {proposer.worker.generation} processes"
            requests = mixed_requests(3, max_tokens=14)
            running.num_engine_steps = 0
            running.add(requests)
            while running.core.has_work:
                running.step()
            assert running.token_ids == plain(target_path, requests)
            time.sleep(0.05)
        assert set(proposer.faults) == kinds
        assert min(proposer.faults.values()) >= 2


def test_a_slow_answer_is_thrown_away_and_the_process_kept(target_path: Path) -> None:
    deadlines = Deadlines(step_s=0.9, hang_s=60.0, pause_s=0.01, longest_pause_s=0.02)
    with custom(custom_resolved(target_path, f"{CLASSES}.SlowOnce"), deadlines) as proposer:
        worker, ask = proposer.worker, Ask([0], [2], [0], [b"\1\0\0\0\1\0\0\0"], [[1]])
        first = worker.ask(ask)
        assert first is not None
        assert first.drafts == [[1]]
        assert worker.ask(ask) is None
        assert not worker.is_ready(), "its answer is still to come"
        until = time.monotonic() + 30
        while not worker.is_ready():
            assert time.monotonic() < until
            time.sleep(0.02)
        third = worker.ask(ask._replace(num_tokens=[1], tokens=[b"\5\0\0\0"], sampled=[[5]]))
        assert third is not None
        assert third.drafts == [[]], "not the answer to the second call"
        assert proposer.faults == {"late": 1}
        assert worker.generation == 1


def test_pauses_double_until_a_call_succeeds(target_path: Path) -> None:
    deadlines = Deadlines(step_s=0.05, hang_s=60.0, first_step_s=60.0, pause_s=100.0, longest_pause_s=300.0)
    with custom(custom_resolved(target_path, f"{CLASSES}.HangsFirst"), deadlines) as proposer:
        worker = proposer.worker
        left = []
        for _ in range(3):
            assert worker.ask(Ask([0], [1], [0], [b"\1\0\0\0"], [[1]])) is None
            left.append(worker._resume_at - time.monotonic())
        assert [round(seconds / 100) for seconds in left] == [1, 2, 3]


REFUSED = {
    "nowhere.at.Proposer": "Cannot import module 'nowhere.at' for custom proposer 'nowhere.at.Proposer': No module named 'nowhere'",
    "tests.proposers.user_broken_module.Proposer": "Cannot import module 'tests.proposers.user_broken_module' for custom proposer "
    "'tests.proposers.user_broken_module.Proposer': no licence",
    f"{CLASSES}.Absent": f"Module '{CLASSES}' has no attribute 'Absent' (speculative_config.model='{CLASSES}.Absent')",
    f"{CLASSES}.NeedsTwoArguments": f"Failed to instantiate custom proposer class '{CLASSES}.NeedsTwoArguments': ",
    f"{CLASSES}.HasNoPropose": f"Custom proposer class '{CLASSES}.HasNoPropose' must have a 'propose' method.",
    f"{CLASSES}.ProposeIsNotCallable": "ProposeIsNotCallable' has a 'propose' attribute but it is not callable.",
    "tests.proposers.user_device_classes.WantsSlots": "has traits with lookahead 3, but method `custom_class` reserves lookahead 0",
    "tests.proposers.user_device_classes.Untraited": "has no traits",
    "tests.proposers.user_device_classes.Broken": "Failed to instantiate custom proposer class",
}


@pytest.mark.parametrize("model", REFUSED)
def test_what_cannot_be_loaded_stops_the_start(target_path: Path, model: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_proposer(custom_resolved(target_path, model))
    assert REFUSED[model] in raised.value.message
    assert raised.value.hint


def test_a_class_that_is_never_ready_stops_the_start(target_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"NeverReady' was not ready within 0\.5 s"):
        build_custom(custom_resolved(target_path, f"{CLASSES}.NeverReady"), deadlines=Deadlines(start_s=0.5))


def test_a_class_with_our_protocol_runs_in_the_engine(target_path: Path) -> None:
    resolved = custom_resolved(target_path, "tests.proposers.user_device_classes.Lookup")
    built: list[Proposer] = []

    def make(resolved: ResolvedConfig) -> Proposer:
        built.append(build_proposer(resolved))  # type: ignore[arg-type]
        return built[-1]

    requests = mixed_requests()
    running = start(resolved, make)
    running.add(requests)
    result = running.finish()
    assert isinstance(built[0], Lookup)
    assert result.token_ids == plain(target_path, requests)
    assert result.num_drafted() > 0


def test_the_process_ends_with_its_proposer(target_path: Path) -> None:
    worker = HostWorker(Offer(f"{CLASSES}.Repeats", 2, 16, 2, 97), PATIENT)
    assert worker.start() == "host"
    process = worker._process
    assert process.pid != os.getpid()
    del worker
    assert process.wait(10) == -9


def test_rows_are_shown_in_batch_order_and_texts_do_not_mix() -> None:
    rows = TokenRows(3, 6)

    def packed(*ids: int) -> bytes:
        return b"".join(one.to_bytes(4, "little") for one in ids)

    lengths, shown = rows.update(Ask([2, 0], [3, 2], [0, 0], [packed(1, 2, 3), packed(7, 8)], [[], []]))
    assert [row[:n].tolist() for row, n in zip(shown, lengths, strict=True)] == [[1, 2, 3], [7, 8]]
    lengths, shown = rows.update(Ask([2, 0], [5, 3], [3, 2], [packed(4, 5), packed(9)], [[], []]))
    assert [row[:n].tolist() for row, n in zip(shown, lengths, strict=True)] == [[1, 2, 3, 4, 5], [7, 8, 9]]
    lengths, shown = rows.update(Ask([0, 2], [4, 2], [3, 0], [packed(10), packed(50, 51)], [[], []]))  # another order, row 2 anew
    assert [row[:n].tolist() for row, n in zip(shown, lengths, strict=True)] == [[7, 8, 9, 10], [50, 51]]
    lengths, shown = rows.update(Ask([0], [8], [4], [packed(11, 12, 13, 14)], [[]]))  # past max_model_len
    assert [row[:n].tolist() for row, n in zip(shown, lengths, strict=True)] == [[7, 8, 9, 10, 11, 12]]


def test_the_class_of_the_guide_drafts(target_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "custom-proposer.md").read_text(encoding="utf-8")
    code = guide.split("```python\n")[1].split("```")[0]
    (tmp_path / "my_drafts.py").write_text(textwrap.dedent(code), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    requests = mixed_requests()
    resolved = custom_resolved(target_path, "my_drafts.LastBigram")
    with custom(resolved) as proposer:
        running = start(resolved, lambda _: proposer)
        running.add(requests)
        result = running.finish()
        assert proposer.faults == {}
    assert result.token_ids == plain(target_path, requests)
    assert result.num_drafted() > 0
