"""Frozen policies, the reference and the teacher: loaded and sharded as the trained one is, and never changed."""

from molt.train.actor.model import Policy, load_policy
from molt.train.config import ActorConfig


def load_frozen(path: str, settings: ActorConfig) -> Policy:
    """Load the checkpoint at `path` as `load_policy` does, without gradients and with dropout off.

    Masters are float32 here too: cast to the dtype of the forward pass by the same means, the policy's own checkpoint
    has its log-probs to the last bit, so the divergence from an unchanged policy is exactly 0.
    """
    policy = load_policy(path, settings)
    for parameter in policy.model.parameters():
        parameter.requires_grad = False
    policy.model.eval()
    return policy
