"""A GGUF file rewritten in bfloat16: the numbers of torch's own rounding, and everything else as it was."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize

from benchmarks.bf16_gguf import as_bf16

Q8_0, F32, BF16 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.BF16


def write_small(path: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    writer = gguf.GGUFWriter(path, arch="llama")
    writer.add_block_count(1)
    writer.add_token_list(["<s>", "a", "b"])
    writer.add_chat_template("{{ messages }}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    weight = quantize(rng.normal(size=(3, 64)).astype(np.float32), Q8_0)
    norm = rng.normal(size=64).astype(np.float32)
    writer.add_tensor("blk.0.attn_q.weight", weight, raw_dtype=Q8_0)
    writer.add_tensor("output_norm.weight", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"blk.0.attn_q.weight": dequantize(weight, Q8_0), "output_norm.weight": norm}


def test_weights_are_rounded_as_torch_rounds_and_the_rest_is_copied(tmp_path: Path) -> None:
    weights = write_small(tmp_path / "q8.gguf")
    target = as_bf16(tmp_path / "q8.gguf", tmp_path / "bf16.gguf")
    reader = gguf.GGUFReader(target)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert (found["blk.0.attn_q.weight"].tensor_type, found["output_norm.weight"].tensor_type) == (BF16, F32)
    rounded = torch.from_numpy(weights["blk.0.attn_q.weight"]).bfloat16().float().numpy()
    assert np.array_equal(dequantize(found["blk.0.attn_q.weight"].data, BF16), rounded)
    assert np.array_equal(found["output_norm.weight"].data, weights["output_norm.weight"])
    values = {name: field.contents() for name, field in reader.fields.items()}
    assert values["general.architecture"] == "llama"
    assert values["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16
    assert values["llama.block_count"] == 1
    assert values["tokenizer.ggml.tokens"] == ["<s>", "a", "b"]
    assert values["tokenizer.chat_template"] == "{{ messages }}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16.gguf", "q8.gguf"]


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "bf16.gguf").write_bytes(b"mine")
    assert as_bf16(tmp_path / "absent.gguf", tmp_path / "bf16.gguf").read_bytes() == b"mine"
