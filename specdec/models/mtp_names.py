"""Where each family of checkpoints keeps its multi-token-prediction modules, and how they join token and state.

Owns: the names. Must not know: arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.models.loader import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpNames:
    """Where a family keeps its modules. outer: of the parts beside the layer; layer: of the decoder layer, both ending in a dot.

    token_first: the projection reads [token; hidden], else [hidden; token]. blanks_first: the token behind position 0 is not read.
    tables: prefix of embedding and head, where they do not stand beside the other parts.
    """

    outer: str
    layer: str
    token_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    head: str | None = None
    embedding: str | None = None
    tables: str | None = None
    token_first: bool = True
    blanks_first: bool = True


def names_of(checkpoint: Checkpoint, num_layers: int, *, index: int = 0) -> MtpNames | None:
    """Which family's module `index` a checkpoint holds; None for none. num_layers: decoder layers of the target."""
    known = checkpoint.names()
    deepseek = f"model.layers.{num_layers + index}."
    if f"{deepseek}eh_proj.weight" in known:
        return MtpNames(
            outer=deepseek, layer=deepseek, token_norm="enorm", hidden_norm="hnorm", projection="eh_proj",
            final_norm="shared_head.norm", head="shared_head.head", embedding="embed_tokens",
        )  # fmt: skip
    if "mtp.fc.weight" in known and index == 0:  # its further layers share one projection, and no engine runs them
        return MtpNames(
            outer="mtp.", layer="mtp.layers.0.", token_norm="pre_fc_norm_embedding", hidden_norm="pre_fc_norm_hidden", projection="fc",
            final_norm="norm", head="lm_head", embedding="embed_tokens", blanks_first=False,
        )  # fmt: skip
    mimo, generic = f"model.mtp_layers.{index}.", f"mtp_layers.{index}."
    if f"{mimo}input_proj.weight" in known:
        return MtpNames(
            outer=mimo, layer=mimo, token_norm="token_layernorm", hidden_norm="hidden_layernorm", projection="input_proj",
            final_norm="final_layernorm", token_first=False,
        )  # fmt: skip
    if f"{generic}input_proj.weight" in known:  # speculators: a checkpoint of its own, with the parts' names but not the order of MiMo
        return MtpNames(
            outer=generic, layer=generic, token_norm="token_layernorm", hidden_norm="hidden_layernorm", projection="input_proj",
            final_norm="final_layernorm", head="lm_head", embedding="embed_tokens", tables="", blanks_first=False,
        )  # fmt: skip
    return None


def count_modules(checkpoint: Checkpoint, num_layers: int) -> int:
    """How many modules of a known family stand one behind the other in a checkpoint."""
    count = 0
    while names_of(checkpoint, num_layers, index=count) is not None:
        count += 1
    return count


def is_mtp_tensor(name: str, num_layers: int) -> bool:
    """Whether a tensor of a target's checkpoint belongs to its MTP modules, which the target itself does not read."""
    if name.startswith(("mtp.", "mtp_layers.", "model.mtp_layers.")):
        return True
    parts = name.split(".")
    return parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdigit() and int(parts[2]) >= num_layers
