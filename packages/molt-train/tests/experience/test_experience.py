"""Segments to experiences: aligned arrays, nothing recorded where nothing is trained, and light fields that agree."""

import numpy as np
import pytest

from molt.train.experience import LocalPayloadStore, make_experience, to_payload
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
    experience = make_experience(segment(), rollout_id="r", group_id="g", payload_ref="ref")
    assert (experience.segment_id, experience.rollout_id, experience.group_id) == ("s/0", "r", "g")
    assert (experience.num_tokens, experience.num_actions) == (6, 3)
    assert (experience.oldest_version, experience.newest_version) == (3, 6)
    assert experience.mean_version == pytest.approx(13 / 3)
    assert experience.payload == "ref"


def test_a_segment_that_trains_nothing_makes_no_experience():
    with pytest.raises(ValueError, match="segment 's/0' has no action tokens"):
        make_experience(segment(action_mask=[0] * 6), rollout_id="r", group_id="g", payload_ref=None)


def test_the_local_store_gives_back_what_was_put():
    store, payload = LocalPayloadStore(), to_payload(segment())
    experience = make_experience(segment(), rollout_id="r", group_id="g", payload_ref=store.put(payload))
    assert store.get(experience.payload) is payload
