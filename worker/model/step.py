"""The input of one forward pass, and the memory that it computes in."""

from dataclasses import dataclass

import torch

from kernels.kv_pool import AttentionRows, KvLayout
from kernels.seals import SealCheck
from worker.model.config import ModelConfig
from worker.model.errors import ModelError


@dataclass(frozen=True, slots=True)
class StepInput:
    """Rows are tokens; those of one sequence are adjacent and ascending in position."""

    token_ids: torch.Tensor  # int64 [num_rows]
    positions: torch.Tensor  # int32 [num_rows]
    slots: torch.Tensor  # int64 [num_rows], page * page_size + offset
    page_table: torch.Tensor  # int32 [num_sequences, max_pages]
    row_sequence: torch.Tensor  # int32 [num_rows]
    logit_rows: torch.Tensor  # int64 [num_logits], rows whose logits are wanted
    seal_check: SealCheck | None = None

    @property
    def rows(self) -> AttentionRows:
        """What each row attends to."""
        return AttentionRows(self.page_table, self.row_sequence, self.positions)

    def check(self, layout: KvLayout, config: ModelConfig) -> None:
        """Raise an error if a row could read or write outside the pool, the vocabulary or the rotary table.

        Ops check their arguments too, but those of a recorded pass only when it is recorded.
        """
        self.rows.check("forward", layout)
        limits = (
            ("token_ids", self.token_ids, 0, config.vocab_size),
            ("positions", self.positions, 0, config.context_length),
            ("slots", self.slots, -1, layout.num_pages * layout.page_size),
            ("logit_rows", self.logit_rows, 0, len(self.token_ids)),
        )
        for name, tensor, first, end in limits:
            numbers = tensor.numpy()
            if len(numbers) and not first <= numbers.min() <= numbers.max() < end:
                raise ModelError(f"forward: {name} must be in [{first}, {end})")


@dataclass(frozen=True, slots=True)
class Workspace:
    """Activations of a forward pass, float32, made once and used by every layer."""

    residual: torch.Tensor  # [rows, hidden]
    x: torch.Tensor  # [rows, hidden], normalized
    qkv: torch.Tensor  # [rows, heads + 2 * kv_heads, head_dim]
    attended: torch.Tensor  # [rows, heads, head_dim]
    projected: torch.Tensor  # [rows, hidden], what a block adds to the residual
    gate_up: torch.Tensor  # [rows, 2 * ffn]
    ffn: torch.Tensor  # [rows, ffn]
    last: torch.Tensor  # [rows, hidden], x of the rows whose logits are wanted

    @classmethod
    def allocate(cls, config: ModelConfig, num_rows: int) -> "Workspace":
        """Memory for as many rows."""
        hidden, heads = config.hidden_size, config.num_heads
        return cls(
            residual=torch.empty(num_rows, hidden),
            x=torch.empty(num_rows, hidden),
            qkv=torch.empty(num_rows, heads + 2 * config.num_kv_heads, config.head_dim),
            attended=torch.empty(num_rows, heads, config.head_dim),
            projected=torch.empty(num_rows, hidden),
            gate_up=torch.empty(num_rows, 2 * config.ffn_size),
            ffn=torch.empty(num_rows, config.ffn_size),
            last=torch.empty(num_rows, hidden),
        )

    @property
    def num_rows(self) -> int:
        """For how many rows there is room."""
        return len(self.x)

    def first(self, num_rows: int) -> "Workspace":
        """The same memory for fewer rows."""
        return Workspace(
            self.residual[:num_rows], self.x[:num_rows], self.qkv[:num_rows], self.attended[:num_rows],
            self.projected[:num_rows], self.gate_up[:num_rows], self.ffn[:num_rows], self.last[:num_rows],
        )  # fmt: skip
