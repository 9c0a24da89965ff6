"""MtpModel: a multi-token-prediction module that was trained with its target, used like an EAGLE head, again for each further draft.

Owns: weights and arithmetic of the module. Must not know: requests, drawing, when it runs.
Sources: DeepSeek-V3 2412.19437; names of DeepSeek, Qwen3-Next and MiMo. Only dense layers with grouped-query attention are served.
Letters: N rows, H hidden, Vd ids that it scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from specdec.config.inference import mtp_depth
from specdec.config.methods import Tap
from specdec.errors import ConfigError
from specdec.kernels.layer_ops import layer_ops
from specdec.logging import get_logger
from specdec.models.attention import AttentionMetadata, KVPair
from specdec.models.draft_head import HeadReader, HeadSetting, HeadStates, Lender, TokenTables
from specdec.models.int8_linear import round_layers, rounded
from specdec.models.linear import Linear
from specdec.models.loader import Checkpoint
from specdec.models.mtp_names import MtpNames, count_modules, names_of
from specdec.models.rope import RotaryTable

logger = get_logger(__name__)

if TYPE_CHECKING:
    from specdec.models.fused_chain import FusedChain


class MtpModel:
    """One module of a checkpoint. index: which one, from 0; the tensors of others are left to their readers.

    Raises:
        ConfigError: there is no module, a tensor of it is missing or has another shape, or its layer is none of the served kind.
    """

    chain: FusedChain | None = None
    num_layers = 1

    def __init__(self, hf_config: Any, checkpoint: Checkpoint, setting: HeadSetting, *, index: int = 0) -> None:
        names = names_of(checkpoint, hf_config.num_hidden_layers, index=index)
        if names is None:
            raise ConfigError(
                f"{checkpoint.path} holds no MTP module of a known family", hint="DeepSeek's, Qwen3-Next's and MiMo's names are known"
            )
        self.names, self.tap, width = names, setting.taps[0], int(hf_config.hidden_size)
        self.id_map = setting.draft_ids
        reader = _ModuleReader(hf_config, checkpoint, setting, names)
        self.shape, self.ops = reader.shape, layer_ops(setting.device)
        self.token_norm, self.hidden_norm = reader.norm(names.token_norm, width), reader.norm(names.hidden_norm, width)
        self.projection = reader.linear([f"{names.outer}{names.projection}"], [width], 2 * width)
        self.layer, self.final_norm = reader.module_layer(), reader.norm(names.final_norm, width)
        self.tables = reader.module_tables()
        if setting.is_int8:
            round_layers([self.layer])
            self.projection = rounded(self.projection)
            self.tables.round()
        self.rotary = RotaryTable(hf_config, head_dim=self.shape.head_dim, max_positions=setting.max_model_len, device=setting.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights of its own."""
        layer = self.layer
        linears = (layer.attention.qkv, layer.attention.out, layer.gate_up, layer.down, self.projection)
        return sum(linear.num_bytes for linear in linears) + self.tables.num_bytes

    def kv_shape(self) -> tuple[int, int]:
        """(num_kv_heads, head_dim) of its layer."""
        return self.shape.num_kv_heads, self.shape.head_dim

    def attach(self, target: Lender) -> None:
        """Borrow the target's embedding and LM head where the module has none."""
        self.tables.attach(target)

    def combine(self, taps: Mapping[Tap, torch.Tensor]) -> torch.Tensor:
        """The target's last state is the feature [N, H]: normed, or for MiMo the stream before the norm."""
        return taps[self.tap]

    def forward(
        self, input_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, kv: Sequence[KVPair], meta: AttentionMetadata
    ) -> HeadStates:
        """Row j joins the token of position j + 1 with the feature of position j; the normed output is scored and fed back."""
        eps = self.shape.eps
        token = self.tables.embed(input_ids)
        if self.names.blanks_first:
            token = token.masked_fill((positions == 0)[:, None], 0.0)
        token, hidden = self.ops.rms_norm(token, self.token_norm, eps), self.ops.rms_norm(features, self.hidden_norm, eps)
        mixed = self.projection(torch.cat((token, hidden) if self.names.token_first else (hidden, token), dim=-1))
        cos, sin = self.rotary.cos[positions], self.rotary.sin[positions]
        delta, residual = self.layer(None, mixed, cos, sin, kv[0], meta)
        normed, _ = self.ops.add_rms_norm(delta, residual, self.final_norm, eps)
        return HeadStates(normed, normed)

    def compute_logits(self, scored: torch.Tensor) -> torch.Tensor:
        """[L, H] -> [L, Vd] float32, of the ids in id_map."""
        return self.tables.logits(scored)


class _ModuleReader(HeadReader):
    """Reads a module by its family's names."""

    def __init__(self, hf_config: Any, checkpoint: Checkpoint, setting: HeadSetting, names: MtpNames) -> None:
        super().__init__(hf_config, checkpoint, setting)
        self.names, self.draft_ids = names, setting.draft_ids
        prefix, _, index = names.layer.rstrip(".").rpartition(".")
        self.prefix, self.layer_index = f"{prefix}.", int(index)

    def norm(self, name: str, width: int) -> torch.Tensor:
        return self.tensor(f"{self.names.outer}{name}.weight", (width,))

    def module_layer(self) -> Any:
        if f"{self.names.layer}self_attn.q_proj.weight" not in self.checkpoint:
            kind = (
                "latent attention" if f"{self.names.layer}self_attn.kv_a_proj_with_mqa.weight" in self.checkpoint else "another attention"
            )
            raise ConfigError(
                f"the MTP module at {self.names.layer}* has {kind}, but only grouped-query attention is served", hint="use another method"
            )
        if len(self.checkpoint.take(f"{self.names.layer}self_attn.q_proj.weight")) == 2 * self.shape.q_size:
            raise ConfigError(
                f"the MTP module at {self.names.layer}* has gated attention, but only plain grouped-query attention is served",
                hint="use another method",
            )
        if f"{self.names.layer}mlp.gate_proj.weight" not in self.checkpoint:
            raise ConfigError(
                f"the MTP module at {self.names.layer}* has a mixture of experts, but only dense MLPs are served", hint="use another method"
            )
        return self.layer(self.layer_index)

    def module_tables(self) -> TokenTables:
        shape = (int(self.config.vocab_size), self.shape.hidden_size)
        embedding, head = (self._own(name, shape) for name in (self.names.embedding, self.names.head))
        linear = None if head is None else Linear(head)
        return TokenTables(embedding, linear, ids=self.draft_ids, row_bytes=shape[1] * self.dtype.itemsize)

    def _own(self, name: str | None, shape: tuple[int, int]) -> torch.Tensor | None:
        full = f"{self.names.outer if self.names.tables is None else self.names.tables}{name}.weight"
        return self.tensor(full, shape) if name is not None and full in self.checkpoint else None


class MtpModules:
    """All modules of one checkpoint, each with a KV pair of its own.

    Raises:
        ConfigError: as MtpModel.
    """

    def __init__(self, hf_config: Any, checkpoint: Checkpoint, setting: HeadSetting) -> None:
        self.id_map = setting.draft_ids
        count = count_modules(checkpoint, hf_config.num_hidden_layers)
        self.modules = [MtpModel(hf_config, checkpoint, setting, index=index) for index in range(count)]
        _leave_the_rest(checkpoint, self.modules)

    @property
    def num_layers(self) -> int:
        """One for each module."""
        return len(self.modules)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights of their own."""
        return sum(module.num_bytes for module in self.modules)

    def kv_shape(self) -> tuple[int, int]:
        """(num_kv_heads, head_dim) of every module's layer."""
        return self.modules[0].kv_shape()

    def attach(self, target: Lender) -> None:
        """Borrow the target's embedding and LM head where a module has none."""
        for module in self.modules:
            module.attach(target)


def first_module(hf_config: Any, checkpoint: Checkpoint, setting: HeadSetting) -> MtpModel:
    """The only module of a checkpoint, or the first where the others are no use.

    Raises:
        ConfigError: as MtpModel.
    """
    module = MtpModel(hf_config, checkpoint, setting)
    depth = mtp_depth(hf_config.to_dict()) or 1
    if module.names.outer == "mtp." and depth > 1:
        checkpoint.skip(*(name for name in checkpoint.names() if name.startswith("mtp.layers.") and not name.startswith("mtp.layers.0.")))
        logger.warning("the checkpoint has %d MTP modules behind one projection; the first one drafts all tokens", depth)
    _leave_the_rest(checkpoint, [module])
    return module


def _leave_the_rest(checkpoint: Checkpoint, modules: Sequence[MtpModel]) -> None:
    """The target's own tensors are read elsewhere. A checkpoint that holds modules alone must hold nothing else."""
    names = modules[0].names
    if names.tables is not None:
        checkpoint.skip("verifier_lm_head.weight")  # the target's own head, which some exports of speculators carry along
        return
    inner = tuple(prefix for module in modules for prefix in (module.names.outer, module.names.layer))
    checkpoint.skip(*(name for name in checkpoint.names() if not name.startswith(inner)))
