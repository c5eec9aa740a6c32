"""Decodes many cells of a planted model at once, all of them at the same position.

A knockout row is born where its baseline draws one of its banned tokens: it copies the baseline's
cache and goes on by itself. So nothing is computed twice, and a step is one pass over all rows.
The forward pass is written out here, so that the truth does not come from an engine of ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["Cells", "Draw", "Planted", "decode"]

_CROWDED = 0.75  # share of unfinished rows below which the others leave the batch
LONGEST = 64  # tokens of a response, as in the task file

Draw = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(logits (B, V), cells (B,), redrawn (B,) bool, position) -> (B,) tokens."""


class Planted:
    """A planted checkpoint as tensors.

    Attributes:
        ids: Word to token id.
        eos: Id that ends a text.
    """

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        self.weights = load_file(folder / "model.safetensors")
        self.layers = int(config["num_hidden_layers"])
        self.heads = int(config["num_attention_heads"])
        self.size = int(config["hidden_size"]) // self.heads
        self.epsilon = float(config["rms_norm_eps"])
        theta = float(config["rope_parameters"]["rope_theta"])
        powers = torch.arange(0, self.size, 2, dtype=torch.float64) / self.size
        angles = torch.arange(128)[:, None] * theta**-powers
        self.cos = torch.cat([angles.cos()] * 2, dim=1).float()
        self.sin = torch.cat([angles.sin()] * 2, dim=1).float()
        tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        self.ids: dict[str, int] = tokenizer["model"]["vocab"]
        self.eos = self.ids["<eos>"]

    def forward(self, tokens: Tensor, cache: Tensor, start: int) -> Tensor:
        """Logits after the last of these tokens; their keys and values go into the cache.

        Args:
            tokens: (B, T) ids at positions start to start + T.
            cache: (layers, 2, B, heads, positions, size).
            start: Position of the first.
        """
        w = self.weights
        batch, n = tokens.shape
        end = start + n
        cos, sin = self.cos[start:end], self.sin[start:end]
        x = w["model.embed_tokens.weight"][tokens]
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            h = self._norm(x, w[name + "input_layernorm.weight"])
            q, k, v = (
                (h @ w[f"{name}self_attn.{part}_proj.weight"].T)
                .view(batch, n, self.heads, self.size)
                .transpose(1, 2)
                for part in "qkv"
            )
            cache[layer, 0, :, :, start:end] = self._turn(k, cos, sin)
            cache[layer, 1, :, :, start:end] = v
            attended = torch.nn.functional.scaled_dot_product_attention(
                self._turn(q, cos, sin),
                cache[layer, 0, :, :, :end],
                cache[layer, 1, :, :, :end],
                is_causal=n > 1,
            )
            flat = attended.transpose(1, 2).reshape(batch, n, -1)
            x = x + flat @ w[name + "self_attn.o_proj.weight"].T
            h = self._norm(x, w[name + "post_attention_layernorm.weight"])
            gate = torch.nn.functional.silu(h @ w[name + "mlp.gate_proj.weight"].T)
            up = h @ w[name + "mlp.up_proj.weight"].T
            x = x + (gate * up) @ w[name + "mlp.down_proj.weight"].T
        last = self._norm(x[:, -1], w["model.norm.weight"])
        return last @ w["model.embed_tokens.weight"].T

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * weight

    @staticmethod
    def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


@dataclass(frozen=True, slots=True)
class Cells:
    """What N cells and C candidates gave.

    Attributes:
        baseline: (N,) int8 grades.
        knockout: (C, N) int8 grades; the baseline's where nothing was banned that it drew.
        forked: (C, N) bool.
        baseline_tokens: (N,) int16, tokens of the baseline.
        fork_tokens: (C, N) int16, tokens that the fork generated; 0 where there is none.
        knockout_tokens: (C, N) int16, tokens of the whole knockout trajectory.
    """

    baseline: NDArray[np.int8]
    knockout: NDArray[np.int8]
    forked: NDArray[np.bool_]
    baseline_tokens: NDArray[np.int16]
    fork_tokens: NDArray[np.int16]
    knockout_tokens: NDArray[np.int16]


@torch.inference_mode()
def decode(
    model: Planted,
    prompts: Sequence[str],
    answers: Sequence[str],
    candidates: Sequence[Sequence[str]],
    draw: Draw,
    *,
    from_scratch: int | None = None,
) -> Cells:
    """Decodes N cells whose prompts have the same length.

    Args:
        model: The planted model.
        prompts: N problems.
        answers: Their right answers.
        candidates: C sets of words that are banned together.
        draw: Draws a token for each row; a banned token's logit is −∞.
        from_scratch: Ban this candidate in all rows from the first step instead of forking.
    """
    n, width = len(prompts), len(model.weights["model.embed_tokens.weight"])
    prompt = torch.tensor([[model.ids[word] for word in text.split()] for text in prompts])
    gold = torch.tensor([model.ids[answer] for answer in answers])
    bans = torch.zeros(len(candidates) + 1, width, dtype=torch.bool)  # the last bans nothing
    for c, words in enumerate(candidates):
        bans[c, [model.ids[word] for word in words]] = True
    # The candidates that ban each token.
    banned_by = [torch.nonzero(bans[:-1, token])[:, 0] for token in range(width)]
    hit = bans[:-1].any(dim=0)

    baseline = np.zeros(n, np.int8)
    knockout = np.zeros((len(candidates), n), np.int8)
    forked = torch.zeros(len(candidates), n, dtype=torch.bool)
    baseline_tokens = np.zeros(n, np.int16)
    fork_tokens, knockout_tokens = (np.zeros((len(candidates), n), np.int16) for _ in range(2))

    start = prompt.shape[1]
    shape = (model.layers, 2, 6 * n, model.heads, start + LONGEST, model.size)
    # A position is read only after it was written, and memory that is never written costs nothing.
    cache = torch.empty(shape)
    cell = torch.arange(n)
    owner = torch.full((n,), len(candidates) if from_scratch is None else from_scratch)
    born = torch.zeros(n, dtype=torch.int64)
    said = torch.zeros(n, dtype=torch.int64)  # 0 before `ans`, 1 right after it, 2 later
    right = torch.zeros(n, dtype=torch.bool)
    dead = torch.zeros(n, dtype=torch.bool)  # finished rows, still in the batch
    logits = model.forward(prompt, cache[:, :, :n], 0)
    for step in range(LONGEST):
        plain = (owner == len(candidates)) & ~dead
        tokens = draw(
            logits.masked_fill(bans[owner], -torch.inf), cell, torch.zeros_like(plain), start + step
        )
        parents, candidates_born = [], []
        for row in torch.nonzero(plain & hit[tokens])[:, 0].tolist():
            new = banned_by[int(tokens[row])]
            new = new[~forked[new, cell[row]]]
            parents += [row] * len(new)
            candidates_born += new.tolist()
        if parents:
            index, of = torch.tensor(parents), torch.tensor(candidates_born)
            forked[of, cell[index]] = True
            again = draw(
                logits[index].masked_fill(bans[of], -torch.inf),
                cell[index],
                torch.ones(len(of), dtype=torch.bool),
                start + step,
            )
            tokens = torch.cat([tokens, again])
            cell, said, right = (torch.cat([x, x[index]]) for x in (cell, said, right))
            owner = torch.cat([owner, of])
            born = torch.cat([born, torch.full((len(of),), step)])
        right = torch.where(said == 1, tokens == gold[cell], right)
        said = torch.where(said == 0, (tokens == model.ids["ans"]).long(), torch.full_like(said, 2))
        over = (tokens == model.eos) | torch.tensor(step == LONGEST - 1)
        over[: len(dead)] &= ~dead
        for row in torch.nonzero(over)[:, 0].tolist():
            i, c, grade = int(cell[row]), int(owner[row]), int(right[row])
            if c == len(candidates) or from_scratch is not None:
                baseline[i], baseline_tokens[i] = grade, step + 1
            else:
                knockout[c, i] = grade
                fork_tokens[c, i], knockout_tokens[c, i] = step + 1 - int(born[row]), step + 1
        if parents:
            cache = _grown(cache, len(dead), len(index))
            added = slice(len(dead), len(dead) + len(index))
            cache[:, :, added, :, : start + step] = cache[:, :, index, :, : start + step]
            dead = torch.cat([dead, torch.zeros(len(index), dtype=torch.bool)])
        dead |= over
        stay = torch.nonzero(~dead)[:, 0]
        if not len(stay):
            break
        if len(stay) < _CROWDED * len(dead):
            kept = cache[:, :, stay, :, : start + step]
            cache[:, :, : len(stay), :, : start + step] = kept
            cell, owner, born, said, right, tokens, dead = (
                x[stay] for x in (cell, owner, born, said, right, tokens, dead)
            )
        logits = model.forward(tokens[:, None], cache[:, :, : len(dead)], start + step)
    inherited = ~forked.numpy()
    knockout = np.where(inherited, baseline, knockout).astype(np.int8)
    knockout_tokens = np.where(inherited, baseline_tokens, knockout_tokens).astype(np.int16)
    return Cells(baseline, knockout, forked.numpy(), baseline_tokens, fork_tokens, knockout_tokens)


def _grown(cache: Tensor, used: int, more: int) -> Tensor:
    """The cache with room for more rows."""
    if used + more <= cache.shape[2]:
        return cache
    shape = list(cache.shape)
    shape[2] = used + more + cache.shape[2] // 2
    larger = torch.empty(shape, dtype=cache.dtype)
    larger[:, :, :used] = cache[:, :, :used]
    return larger
