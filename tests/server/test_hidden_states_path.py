"""An answer of a server that writes hidden states names the file, as vLLM spells it."""

from __future__ import annotations

from pathlib import Path

from specdec.config.method_configs import ExtractHiddenStatesConfig, NgramConfig
from specdec.proposers.hidden_states_files import HiddenStatesFiles
from specdec.server.usage import transfer_params


def test_the_answer_names_the_file_that_the_writer_writes(tmp_path: Path) -> None:
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}}
    config = ExtractHiddenStatesConfig(draft_model_config=layers, shared_storage_path=str(tmp_path))
    files = HiddenStatesFiles(tmp_path, {})
    for request_id in ("cmpl-1-0", "a/../b c"):
        named = transfer_params([request_id], config)["kv_transfer_params"]["hidden_states_path"]
        assert named == str(files.path_of(request_id))
        assert Path(named).parent == tmp_path
    several = transfer_params(["a", "b"], config)["kv_transfer_params"]["hidden_states_path"]
    assert several == [str(files.path_of("a")), str(files.path_of("b"))]
    assert transfer_params(["a"], NgramConfig(num_speculative_tokens=2)) == transfer_params(["a"], None) == {}
