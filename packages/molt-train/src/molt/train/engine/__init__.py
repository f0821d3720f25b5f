"""Engines: the policy that is being served. Only `engine/vllm*.py` and `refit/`'s engine half import vllm."""
