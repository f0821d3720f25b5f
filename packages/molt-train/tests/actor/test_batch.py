"""Rows as padded tensors, by hand."""

import numpy as np
import pytest
import torch

from molt.train.actor.batch import collate

CPU = torch.device("cpu")


@pytest.fixture
def rows(make_payload):
    long = make_payload([1, 2, 3, 4, 0], [0, 0, 1, 0, 1], [0.0, 0.0, -0.5, 0.0, -0.25])
    short = make_payload([2, 4, 1], [0, 1, 1], [0.0, -1.0, -2.0])
    return [(long, np.array([1.0, 2.0], np.float32)), (short, np.array([-1.0, -2.0], np.float32))]


def test_rows_are_padded_to_the_longest(rows):
    batch = collate(rows, device=CPU)
    assert batch.input_ids_BT.tolist() == [[1, 2, 3, 4, 0], [2, 4, 1, 0, 0]]
    assert batch.attention_mask_BT.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]


def test_the_position_before_an_action_predicts_it(rows):
    batch = collate(rows, device=CPU)
    assert batch.predicts_action_BT.int().tolist() == [[0, 1, 0, 1, 0], [1, 1, 0, 0, 0]]


def test_the_action_axis_runs_row_by_row_token_by_token(rows):
    batch = collate(rows, device=CPU)
    assert batch.targets_N.tolist() == [3, 0, 4, 1]
    assert batch.behaviour_N.tolist() == [-0.5, -0.25, -1.0, -2.0]
    assert batch.advantages_N.tolist() == [1.0, 2.0, -1.0, -2.0]


def test_every_target_follows_the_position_that_predicts_it(rows):
    batch = collate(rows, device=CPU)
    following = batch.input_ids_BT.roll(-1, dims=1)[batch.predicts_action_BT]
    assert following.tolist() == batch.targets_N.tolist()


def test_types_are_those_that_models_and_losses_take(rows):
    batch = collate(rows, device=CPU)
    assert (batch.input_ids_BT.dtype, batch.targets_N.dtype) == (torch.int64, torch.int64)
    assert (batch.behaviour_N.dtype, batch.advantages_N.dtype) == (torch.float32, torch.float32)


def test_no_row_is_one_inert_row():
    batch = collate([], device=CPU)
    assert batch.input_ids_BT.tolist() == [[0, 0]]
    assert batch.attention_mask_BT.tolist() == [[1, 0]], "it attends to something, or softmax would divide by zero"
    assert not batch.predicts_action_BT.any()
    assert (len(batch.targets_N), len(batch.behaviour_N), len(batch.advantages_N)) == (0, 0, 0)
