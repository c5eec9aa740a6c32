"""Forward passes of teacher and student over finished rollouts, for the per-position scores."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knockout.errors import KnockoutError
from knockout.mining.kl import Head, PositionScores, chunk_positions, score_hidden
from knockout.training.heads import CHECK_TOKENS, head_of, project, reproduces

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ScoringModel", "length_batches", "score_sequences"]

log = logging.getLogger(__name__)


class ScoringModel:
    """A causal language model as hidden states and a head.

    Most models are a base model, a linear head, and for some a scale or a soft cap that their
    configuration names; their logits can then be made for a few positions at a time. At the start
    that is compared with the model's own logits on a short text. A model that does something else
    to its logits is run as a whole instead, one sequence at a time, in chunks of positions over
    its key-value cache: slower, and never wrong.

    Attributes:
        model: The transformers model, in evaluation mode.
        name: For messages.
        vocab_size: Width of its logits, padding included.
        split: Whether hidden states times head reproduces the model's logits.
    """

    def __init__(self, model: PreTrainedModel, name: str, check_ids: Sequence[int]) -> None:
        """Takes a loaded model.

        Args:
            model: A causal language model of transformers.
            name: For messages.
            check_ids: Token ids of a short text, to compare the logits on.
        """
        model.train(False)
        self.model: Any = model
        self.name = name
        self.device: torch.device = model.device
        with torch.inference_mode():
            ids = torch.tensor([list(check_ids)[:CHECK_TOKENS]], device=self.device)
            own = self.model(ids, use_cache=False).logits
            self.vocab_size = int(own.shape[-1])
            self.split = self._splits(ids, own)
            self._head = head_of(model) if self.split else None
        if not self.split:
            log.warning(
                "%s: its logits are not base model × head; scoring runs the whole model, slower",
                name,
            )

    def _splits(self, ids: Tensor, own: Tensor) -> bool:
        """Whether `head(hidden)` equals the model's own logits (1, L, V) on ids (1, L)."""
        if self.model.base_model is self.model:
            return False
        try:
            states = self.hidden(ids, torch.ones_like(ids))
        except (AttributeError, RuntimeError, TypeError) as error:
            log.debug("%s: %s", self.name, error)
            return False
        return reproduces(self.model, states, own)

    def hidden(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Last hidden states. ids and mask (B, L) int64, padded on the right -> (B, L, H)."""
        states: Tensor = self.model.base_model(
            input_ids=ids, attention_mask=mask, use_cache=False
        ).last_hidden_state
        return states

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states. (..., H) -> (..., V) float32."""
        assert self._head is not None
        flat = project(hidden.reshape(-1, hidden.shape[-1]), self._head)
        return flat.reshape(*hidden.shape[:-1], flat.shape[-1])

    def states(self, sequences: Sequence[NDArray[np.int32]], starts: Sequence[int]) -> Tensor:
        """Hidden states that predict the tokens from `starts` on, one sequence after another.

        Args:
            sequences: Token ids (L_i,) of prompt and response.
            starts: Index of each response's first token, at least 1.

        Returns:
            (Σ (L_i − start_i), H).
        """
        lengths = [len(s) for s in sequences]
        ids = torch.zeros(len(sequences), max(lengths), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            ids[row, : lengths[row]] = torch.from_numpy(sequence.astype(np.int64))
            mask[row, : lengths[row]] = 1
        hidden = self.hidden(ids.to(self.device), mask.to(self.device))
        parts = [hidden[row, start - 1 : lengths[row] - 1] for row, start in enumerate(starts)]
        return torch.cat(parts)

    def whole(self, sequence: NDArray[np.int32], start: int) -> tuple[Tensor, Head]:
        """One sequence for a model whose logits cannot be split: positions, and a head for them.

        The head must be called with consecutive, growing ranges of the positions.
        """
        ids = torch.from_numpy(sequence.astype(np.int64))[None].to(self.device)
        done = 0
        cache: Any = None

        def head(positions: Tensor) -> Tensor:
            nonlocal done, cache
            end = int(positions[-1]) + 1
            out = self.model(
                ids[:, done:end],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=positions.shape[0],
            )
            done, cache = end, out.past_key_values
            logits: Tensor = out.logits[0, -positions.shape[0] :]
            return logits

        return torch.arange(start - 1, len(sequence) - 1, device=self.device), head


def length_batches(lengths: Sequence[int], tokens_per_batch: int) -> Iterator[list[int]]:
    """Groups sequences of similar length, longest first.

    Args:
        lengths: Tokens of each sequence.
        tokens_per_batch: Most tokens of a batch, padding included; a longer sequence goes alone.

    Yields:
        Indices of a batch.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch and lengths[batch[0]] * (len(batch) + 1) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@torch.inference_mode()
def score_sequences(
    students: Sequence[ScoringModel],
    teacher: ScoringModel,
    prompts: Sequence[NDArray[np.int32]],
    responses: Sequence[NDArray[np.int32]],
    *,
    top_k: int = 20,
    tokens_per_batch: int = 4096,
    chunk: int | None = None,
    merge: Sequence[Sequence[int]] = (),
) -> list[list[PositionScores]]:
    """Scores every token of the responses.

    Args:
        students: The student after training and, where wanted, before it.
        teacher: The teacher; it shares the students' token ids.
        prompts: Token ids (P_i,), at least one each.
        responses: Token ids (T_i,), the student's own.
        top_k: Candidate set of signal and noise.
        tokens_per_batch: Most tokens of a forward pass, padding included.
        chunk: Positions whose logits exist at once; None takes `chunk_positions`.
        merge: As in `score_hidden`.

    Returns:
        For each student, for each sequence, scores of (T_i,) positions, on the CPU.

    Raises:
        KnockoutError: A prompt is empty, or a token is outside the models' shared ids.
    """
    models = [*students, teacher]
    width = min(m.vocab_size for m in models)
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if not len(prompt):
            raise KnockoutError(f"sequence {index}: its prompt is empty; nothing predicts token 1")
        highest = max(int(prompt.max()), int(response.max(initial=0)))
        if highest >= width:
            raise KnockoutError(
                f"sequence {index} contains token {highest}, but the models share ids 0 to {width - 1}"
            )
    sequences = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
    chunk = chunk or chunk_positions(max(m.vocab_size for m in models), teacher.device)
    split = all(m.split for m in models)
    found: list[list[PositionScores | None]] = [[None] * len(sequences) for _ in students]
    budget = tokens_per_batch if split else 1
    for batch in length_batches([len(s) for s in sequences], budget):
        part = [sequences[i] for i in batch]
        starts = [len(prompts[i]) for i in batch]
        sides = [
            (m.states(part, starts), m.head) if m.split else m.whole(part[0], starts[0])
            for m in models
        ]
        emitted = torch.from_numpy(np.concatenate([responses[i] for i in batch]).astype(np.int64))
        scores = score_hidden(sides[:-1], sides[-1], emitted, top_k=top_k, chunk=chunk, merge=merge)
        sizes = [len(responses[i]) for i in batch]
        for own, one in zip(found, scores, strict=True):
            split_up = [torch.split(x.cpu(), sizes) for x in one]
            for place, values in zip(batch, zip(*split_up, strict=True), strict=True):
                own[place] = PositionScores(*values)
    return [[one for one in own if one is not None] for own in found]
