"""Other projects' batches, made by hand in the layouts that they document."""

from __future__ import annotations

import pytest
import torch

from knockout.training import freeze_weights
from knockout.training.adapters import kdflow, openrlhf, verl

ROCK = 8


def kdflow_batch() -> dict[str, torch.Tensor]:
    # Prompt 1 2, response 5 8 6 8 3; then prompt 1, response 8 7, padding 0.
    ids = torch.tensor([[1, 2, 5, 8, 6, 8, 3], [1, 8, 7, 0, 0, 0, 0]])
    # The mask marks what predicts a response token: the last prompt token to the last but one.
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0, 0]])
    number = torch.tensor(7.0)
    return {"stu_input_ids": ids, "stu_loss_mask": mask, "avg_micro_batch_token_num": number}


def test_kdflow_freezes_what_a_position_predicts_or_what_it_has_read() -> None:
    batch = kdflow_batch()
    # Rows: predictions of 5 8 6 8 3, then of 8 7.
    assert kdflow.row_weights(batch, [ROCK]).tolist() == [1, 0, 1, 0, 1, 0, 1]
    # The same rows have read 2 5 8 6 8, then 1 8: the token after each rock is frozen.
    read = kdflow.row_weights(batch, [ROCK], position="read", freeze_weight=0.25)
    assert read.tolist() == [1, 1, 0.25, 1, 0.25, 1, 0.25]
    labels = batch["stu_input_ids"]
    shifted = freeze_weights(labels, None, [ROCK], label_shift=1)[batch["stu_loss_mask"].bool()]
    assert torch.equal(kdflow.row_weights(batch, [ROCK]), shifted)


def test_kdflow_reading_is_a_shift_of_minus_one_on_the_response() -> None:
    """In a response's own columns the two conventions are the shifts 0 and −1."""
    response = torch.tensor([[5, 8, 6, 8, 3]])
    batch = {
        "stu_input_ids": torch.tensor([[1, 2, 5, 8, 6, 8, 3]]),
        "stu_loss_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 0]]),
    }
    predicted = freeze_weights(response, None, [ROCK])
    read = freeze_weights(response, None, [ROCK], label_shift=-1)
    assert torch.equal(kdflow.row_weights(batch, [ROCK]), predicted[0])
    # The first has read the prompt's last token, which is no response token: it is trained on.
    assert torch.equal(kdflow.row_weights(batch, [ROCK], position="read")[1:], read[0, 1:])


def test_kdflow_windows_stay_in_their_sequence() -> None:
    batch = kdflow_batch()
    loss = torch.tensor([2.0, 2.0, 0.1, 2.0, 2.0, 2.0, 2.0])
    found = kdflow.row_weights(batch, [ROCK], loss=loss, window=1, threshold=1.0)
    # 5 and 3 stand beside a rock and are hard; 6 is easy; in the second sequence 7 is hard.
    assert found.tolist() == [0, 0, 1, 0, 0, 0, 0]
    with pytest.raises(ValueError, match=r"expected \(7,\)"):
        kdflow.row_weights(batch, [ROCK], loss=loss[:3], window=1, threshold=1.0)


def test_kdflow_divides_by_all_tokens_or_by_what_is_kept() -> None:
    batch = kdflow_batch()
    loss = torch.arange(7.0).requires_grad_()
    weights = kdflow.row_weights(batch, [ROCK])
    kept = loss[weights > 0].sum()
    torch.testing.assert_close(kdflow.divide(loss, weights, batch), kept / 7)
    torch.testing.assert_close(kdflow.divide(loss, weights, batch, by="kept"), kept / 4)
    nothing = torch.zeros(7)
    assert kdflow.divide(loss, nothing, batch, by="kept") == 0
    with pytest.raises(ValueError, match="kept or tokens"):
        kdflow.divide(loss, weights, batch, by="batch")  # type: ignore[arg-type]


def test_verl_takes_padded_and_nested_batches() -> None:
    responses = torch.tensor([[5, 8, 6, 8], [8, 7, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    losses = torch.tensor([[1.0, 2, 3, 4], [5, 6, 0, 0]], requires_grad=True)
    padded = {"responses": responses, "response_mask": mask}
    parts = [responses[0], responses[1, :2]]
    nested = {
        "responses": torch.nested.as_nested_tensor(parts, layout=torch.jagged),
        "response_mask": torch.nested.as_nested_tensor(
            [torch.ones_like(p) for p in parts], layout=torch.jagged
        ),
    }
    for data in (padded, nested):
        weighted, weights = verl.weigh(losses, data, [ROCK], weight=0.5)
        assert weights.tolist() == [[1, 0.5, 1, 0.5], [0.5, 1, 0, 0]]
        assert weighted.tolist() == [[1, 1, 3, 2], [2.5, 6, 0, 0]]
        weighted.sum().backward()
        assert torch.equal(losses.grad, weights)  # type: ignore[arg-type]
        losses.grad = None
    # A tool's answer inside a response is masked, and a window does not cross it.
    tool = {"responses": responses, "response_mask": torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0]])}
    _, weights = verl.weigh(losses.detach(), tool, [8], window=3, threshold=0.0, pillars=[7])
    assert weights.tolist() == [[0, 0, 0, 0], [0, 1, 0, 0]]
    with pytest.raises(ValueError, match=r"losses \(2, 3\)"):
        verl.weigh(losses[:, :3], padded, [ROCK])


def test_openrlhf_takes_the_last_columns() -> None:
    # Prompts of 2 and 1 tokens padded on the left; end of text is 9, and 0 fills up after it.
    sequences = torch.tensor([[1, 2, 5, 8, 9], [0, 1, 8, 9, 0]])
    action_mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert openrlhf.labels_of(sequences, action_mask).tolist() == [[5, 8, 9], [8, 9, -100]]
    losses = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    weighted, weights = openrlhf.weigh(losses, sequences, action_mask, [ROCK])
    assert weights.tolist() == [[1, 0, 1], [0, 1, 0]]
    assert weighted.tolist() == [[1, 0, 3], [0, 5, 0]]
    logits = torch.arange(2 * 5 * 2.0).view(2, 5, 2)
    found = openrlhf.response_logits(logits, action_mask)
    # Column t of the response is predicted by the column before it.
    assert torch.equal(found, logits[:, [1, 2, 3]])
    with pytest.raises(ValueError, match="expected"):
        openrlhf.labels_of(sequences[:, :3], action_mask)
