"""Segments to experiences: aligned arrays, nothing recorded where nothing is trained, and light fields that agree."""

import pickle

import numpy as np
import pytest

from molt.train.experience import LocalPayloadStore, offload_trained, to_payload
from molt.train.records.experience import Experience
from molt.train.records.trajectory import Segment


def segment(**changes):
    fields = {
        "segment_id": "s/0",
        "turn_ids": ["a", "b"],
        "opened_by": "start",
        "token_ids": [7, 8, 9, 10, 11, 12],
        "action_mask": [0, 0, 1, 0, 1, 1],
        "logprobs": [0.0, -0.5, -1.0, 0.0, -2.0, -3.0],
        "versions": [None, 9, 3, None, 4, 6],
        "trained": True,
    }
    return Segment(**(fields | changes))


class Store:
    """A store whose references are numbers."""

    def __init__(self):
        self.payloads = []

    def put(self, payload):
        self.payloads.append(payload)
        return len(self.payloads) - 1

    def get(self, ref):
        return self.payloads[ref]


def offload(row, store=LocalPayloadStore()):  # noqa: B008 - it has no state
    return Experience.offload(to_payload(row), store, segment_id=row.segment_id, rollout_id="r", group_id="g")


def test_a_payload_has_aligned_arrays_of_the_declared_types():
    payload = to_payload(segment())
    assert payload.token_ids.tolist() == [7, 8, 9, 10, 11, 12]
    assert payload.action_mask.tolist() == [False, False, True, False, True, True]
    dtypes = [a.dtype for a in (payload.token_ids, payload.action_mask, payload.logprobs, payload.versions)]
    assert dtypes == [np.int32, np.bool_, np.float32, np.int32]


def test_a_token_sampled_but_trained_elsewhere_carries_neither_logprob_nor_version():
    payload = to_payload(segment())
    assert payload.logprobs.tolist() == [0.0, 0.0, -1.0, 0.0, -2.0, -3.0]
    assert payload.versions.tolist() == [-1, -1, 3, -1, 4, 6]


def test_the_light_fields_describe_the_action_tokens_only():
    experience = offload(segment(), store=Store())
    assert (experience.segment_id, experience.rollout_id, experience.group_id) == ("s/0", "r", "g")
    assert (experience.num_tokens, experience.num_actions) == (6, 3)
    assert (experience.oldest_version, experience.newest_version) == (3, 6)
    assert experience.mean_version == pytest.approx(13 / 3)
    assert experience.payload == 0


def test_a_segment_that_trains_nothing_makes_no_experience():
    with pytest.raises(ValueError, match="segment 's/0' has no action tokens"):
        offload(segment(action_mask=[0] * 6))


def test_reload_gives_back_what_offload_put():
    store = Store()
    experience = offload(segment(), store=store)
    assert experience.reload(store) is store.payloads[0]
    assert offload(segment()).reload(LocalPayloadStore()).token_ids.tolist() == [7, 8, 9, 10, 11, 12]


def test_only_trained_segments_are_offloaded_in_their_order():
    store = Store()
    rows = [segment(segment_id="a"), segment(segment_id="b", trained=False), segment(segment_id="c", token_ids=[1] * 6)]
    experiences = offload_trained(rows, store, rollout_id="r", group_id="g")
    assert [e.segment_id for e in experiences] == ["a", "c"]
    assert [e.reload(store).token_ids[0] for e in experiences] == [7, 1]


def test_what_travels_has_one_size_whatever_the_length_of_the_segment():
    def size_of(num_tokens):
        row = segment(
            token_ids=[1] * num_tokens,
            action_mask=[0] + [1] * (num_tokens - 1),
            logprobs=[-1.0] * num_tokens,
            versions=[3] * num_tokens,
        )
        return len(pickle.dumps(offload(row, store=Store())))

    assert size_of(100_000) - size_of(10) <= 8  # two larger integers
