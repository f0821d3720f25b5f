"""A policy small enough to follow by hand, in a process group of one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from molt.train.records.experience import Payload

NUM_TOKENS = 5


class Tiny(torch.nn.Module):
    """The logits after a token are that token's row of one table, which starts at all zeros: every token is 1/5."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(NUM_TOKENS, NUM_TOKENS))

    def forward(self, *, input_ids, attention_mask, use_cache):
        assert attention_mask.shape == input_ids.shape
        assert not use_cache
        return SimpleNamespace(logits=self.table[input_ids])


@pytest.fixture(scope="session")
def process_group(tmp_path_factory):
    meeting = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def tiny():
    return Tiny()


@pytest.fixture
def make_payload():
    def make(token_ids, actions, logprobs=None):
        """`actions` and `logprobs` have one entry a token; without log-probs an action's is that of chance."""
        actions = np.asarray(actions, bool)
        chance = np.where(actions, np.float32(-np.log(NUM_TOKENS)), np.float32(0))
        return Payload(
            token_ids=np.asarray(token_ids, np.int32),
            action_mask=actions,
            logprobs=chance if logprobs is None else np.asarray(logprobs, np.float32),
            versions=np.where(actions, 0, -1).astype(np.int32),
        )

    return make
