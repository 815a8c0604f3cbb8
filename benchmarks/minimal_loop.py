"""The opponent: one step of the same work as a careful person writes it by hand in plain PyTorch.

A Hugging Face model with float32 weights under bfloat16 autocast, right-padded batches, logits only where a token is
trained, a float32 log-softmax, PPO-clip, AdamW. No sharding, no shared prefixes, no recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainer_backend.batch import Row


class MinimalLoop:
    def __init__(
        self, model: str, device: torch.device, *, dtype: torch.dtype = torch.bfloat16, learning_rate: float = 0.0
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.device, self.dtype = device, dtype
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        self.model.to(device).eval()  # no dropout
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)

    def step(self, rows: Sequence[Row], max_tokens: int) -> tuple[float, float]:
        """One optimizer step on rows with advantages, at most ``max_tokens`` padded tokens at a time; loss and norm of
        the gradient."""
        trained = sum(row.trained_tokens for row in rows)
        total = 0.0
        for batch in batches(rows, max_tokens):
            loss = self.losses(batch).sum() / trained
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm.item()

    def losses(self, rows: Sequence[Row]) -> Tensor:
        """PPO-clip of every trained token, [trained tokens]."""

        def padded(name: str) -> Tensor:
            arrays = [torch.from_numpy(np.array(getattr(row, name))) for row in rows]
            return pad_sequence(arrays, batch_first=True).to(self.device)

        ids, mask = padded("token_ids"), padded("trained")[:, 1:]
        lengths = torch.tensor([len(row.token_ids) for row in rows], device=self.device)
        attention_mask = torch.arange(ids.shape[1], device=self.device) < lengths[:, None]
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            hidden = self.hidden(ids[:, :-1], attention_mask[:, :-1])
            logits = self.model.lm_head(hidden[mask])
        log_p = (logits.float() / padded("temperatures")[:, 1:][mask][:, None]).log_softmax(-1)
        with torch.no_grad():
            self.entropy = -(log_p.exp() * log_p).sum(-1)
        logprobs = log_p.gather(-1, ids[:, 1:][mask][:, None])[:, 0]
        ratio = (logprobs - padded("rollout_logprobs")[:, 1:][mask]).exp()
        advantages = padded("advantages")[:, 1:][mask]
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

    def hidden(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        output: Tensor = self.model.model(input_ids=ids, attention_mask=attention_mask, use_cache=False)[0]
        return output


def batches(rows: Sequence[Row], max_tokens: int) -> Iterator[list[Row]]:
    """Rows of similar length together; a longer row than ``max_tokens`` alone."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: -len(row.token_ids)):
        if batch and (len(batch) + 1) * len(batch[0].token_ids) > max_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
