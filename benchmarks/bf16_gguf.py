"""The weights of a GGUF file as another one in bfloat16, for engines that read GGUF: same tokenizer, same template, same numbers.

Owns: the conversion. Must not know: what the weights mean.
"""

from __future__ import annotations

from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

WRITTEN_BY_GGUF = ("GGUF.", "general.architecture", "general.file_type")  # fields that the writer makes itself
BF16, F32 = GGMLQuantizationType.BF16, GGMLQuantizationType.F32


def as_bf16(source: Path, target: Path) -> Path:
    """Write source with every tensor but those in float32 (norms) rounded to bfloat16, unless target is there, and return target."""
    if target.exists():
        return target
    reader, fresh = GGUFReader(source), target.with_suffix(".part")
    writer = GGUFWriter(fresh, arch=str(reader.fields["general.architecture"].contents()))
    _copy_fields(reader, writer)
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        kind = F32 if tensor.tensor_type == F32 else BF16
        writer.add_tensor(tensor.name, quantize(dequantize(tensor.data, tensor.tensor_type), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return fresh.rename(target)


def _copy_fields(reader: GGUFReader, writer: GGUFWriter) -> None:
    for field in reader.fields.values():
        if not field.name.startswith(WRITTEN_BY_GGUF):
            item = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=item)
