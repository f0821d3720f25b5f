"""Molt's trainer: gateway, rollout pool, engines, actor, refit. The stages are listed in docs/architecture.md."""
