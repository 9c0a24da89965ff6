"""extract_hidden_states: the files hold what transformers computes, whatever happened to the request on its way."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from specdec.config.engine import ResolvedConfig
from specdec.config.method_configs import ExtractHiddenStatesConfig
from specdec.config.methods import traits_for
from specdec.errors import ConfigError
from specdec.proposers.base import build_proposer
from specdec.proposers.extract_hidden_states import ExtractHiddenStatesProposer
from specdec.proposers.hidden_states_files import HiddenStatesFiles, Progress
from tests.proposers.scenarios import SCENARIOS, Scenario, check_lossless
from tests.proposers.tiny import mixed_requests, plain, request, resolved_for, start

LAYERS = (2, 0, 4)


def extracting(
    path: Path, storage: Path, *, layers: tuple[int, ...] = LAYERS, with_output: bool = False, **settings: Any
) -> ResolvedConfig:
    model = {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}
    speculative = ExtractHiddenStatesConfig(draft_model_config=model, shared_storage_path=str(storage), include_output_tokens=with_output)
    return resolved_for(path, traits=traits_for(speculative, num_target_layers=4), speculative=speculative, **settings)


@torch.inference_mode()
def oracle_states(path: Path, token_ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """[T, layers, H] of transformers: the input of layer m is what m layers have made. The last one is listed after the norm."""
    model = LlamaForCausalLM.from_pretrained(path)
    kept: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return torch.stack([kept[0][0] if layer == len(states) - 1 else states[layer][0] for layer in sorted(layers)], dim=1)


def assert_holds(file: Path, path: Path, token_ids: list[int], layers: tuple[int, ...] = LAYERS) -> None:
    tensors = load_file(file)
    assert set(tensors) == {"hidden_states", "token_ids"}
    assert tensors["token_ids"].tolist() == token_ids
    expected = oracle_states(path, token_ids, layers)
    assert expected.abs().max() > 0.3
    torch.testing.assert_close(tensors["hidden_states"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("with_output", [False, True], ids=["prompt", "with_output"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_files_hold_what_transformers_computes(deep_path: Path, tmp_path: Path, scenario: Scenario, with_output: bool) -> None:
    resolved = extracting(deep_path, tmp_path, with_output=with_output, **scenario.settings)
    built: list[ExtractHiddenStatesProposer] = []

    def make(resolved: ResolvedConfig) -> ExtractHiddenStatesProposer:
        proposer = build_proposer(resolved)
        assert isinstance(proposer, ExtractHiddenStatesProposer)
        built.append(proposer)
        return proposer

    result = check_lossless(deep_path, scenario, traits=resolved.traits, make=make, build=lambda _: resolved)
    assert result.num_drafted() == 0
    built[0].files.wait()
    requests = [one for wave in scenario.requests() for one in wave]
    for one in requests:
        output = result.token_ids[one.request_id][:-1] if with_output else []
        assert_holds(built[0].files.path_of(one.request_id), deep_path, [*one.prompt_token_ids, *output])
    assert len(list(tmp_path.iterdir())) == len(requests), "no lock, and no part of a file, is left"
    assert built[0].files.progress.num_files == len(requests), "no file is written twice"
    assert built[0]._written == {}
    assert built[0]._live == {}


def test_one_layer_and_the_metadata(deep_path: Path, tmp_path: Path) -> None:
    resolved = extracting(deep_path, tmp_path, layers=(3,))
    running = start(resolved)
    running.add([request("a", [5, 6, 7, 8, 9])])
    running.finish()
    proposer = running.runner.proposer
    assert isinstance(proposer, ExtractHiddenStatesProposer)
    proposer.files.wait()
    assert_holds(tmp_path / "a.safetensors", deep_path, [5, 6, 7, 8, 9], (3,))
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"layers": "3", "model": "tiny"}
    assert proposer.files.progress == Progress(1, 5, 5 * 32 * 4 + 5 * 8, 0)


def test_the_cache_of_states_counts_against_memory(deep_path: Path, tmp_path: Path) -> None:
    proposer = build_proposer(extracting(deep_path, tmp_path))
    assert proposer is not None
    need = proposer.memory()
    assert need.kv_layers == ((1, 32), (1, 32))  # three layers take two pairs
    assert need.kv_bytes_per_block == 4 * 4 * 32 * 4


def test_aborted_requests_leave_nothing(deep_path: Path, tmp_path: Path) -> None:
    running = start(extracting(deep_path, tmp_path, with_output=True))
    running.add([request("gone", [1, 2, 3]), request("kept", [4, 5, 6])])
    for _ in range(3):
        running.step()
    assert (tmp_path / "gone.safetensors.lock").exists()
    running.core.abort("gone")
    running.finish()
    running.runner.proposer.files.wait()  # type: ignore[union-attr]
    assert [path.name for path in tmp_path.iterdir()] == ["kept.safetensors"]


def test_a_reader_waits_for_the_whole_file(tmp_path: Path) -> None:
    files = HiddenStatesFiles(tmp_path, {})
    files.open("a")
    with (tmp_path / "a.safetensors.lock").open() as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        files.write("a", torch.ones(3, 1, 4), torch.arange(3))
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert load_file(tmp_path / "a.safetensors")["token_ids"].tolist() == [0, 1, 2]
    files.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_no_request_id_leads_out_of_the_directory(tmp_path: Path) -> None:
    files = HiddenStatesFiles(tmp_path / "in", {})
    names = ["../x", "/etc/passwd", "a/b", "a_b", "..", "", "x" * 400, "ä"]
    paths = [files.path_of(name) for name in names]
    assert all(path.parent == tmp_path / "in" for path in paths)
    assert len({path.name for path in paths}) == len(names)
    assert files.path_of("a_b").name == "a_b.safetensors"
    for name in names:
        files.write(name, torch.ones(1, 1, 1), torch.zeros(1, dtype=torch.int64))
    files.wait()
    assert files.progress.num_files == len(names)
    assert list(tmp_path.iterdir()) == [tmp_path / "in"]


def test_a_file_that_cannot_be_written_costs_no_request(deep_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    requests = mixed_requests(3)
    running = start(extracting(deep_path, tmp_path / "gone"))
    (tmp_path / "gone").rmdir()
    running.add(requests)
    result = running.finish()
    assert result.token_ids == plain(deep_path, requests)
    files = running.runner.proposer.files  # type: ignore[union-attr]
    files.wait()
    assert files.progress.num_files == 0
    assert files.progress.num_failed >= 3
    assert len([record for record in caplog.records if "were not written" in record.message]) == 1


def test_a_path_that_is_no_directory_stops_the_start(deep_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"shared_storage_path is '.*file', which cannot be made"):
        build_proposer(extracting(deep_path, tmp_path / "file"))
