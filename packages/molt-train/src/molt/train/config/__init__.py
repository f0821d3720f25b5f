"""Typed configuration: one frozen struct an owner, read from TOML with dotted overrides."""

from molt.train.config.checks import GROUP_ESTIMATORS, check
from molt.train.config.folders import cache_folder
from molt.train.config.load import known_keys, load_config, to_toml
from molt.train.config.sections import (
    ActorConfig,
    AgentConfig,
    AlgorithmConfig,
    ClusterConfig,
    Config,
    DataConfig,
    EngineConfig,
    GatewayConfig,
    ModelConfig,
    OptimizerConfig,
    PoolConfig,
    RolloutConfig,
    RunConfig,
    ServerConfig,
    SftConfig,
    TrainConfig,
)

__all__ = [
    "GROUP_ESTIMATORS",
    "ActorConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "EngineConfig",
    "GatewayConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PoolConfig",
    "RolloutConfig",
    "RunConfig",
    "ServerConfig",
    "SftConfig",
    "TrainConfig",
    "cache_folder",
    "check",
    "known_keys",
    "load_config",
    "to_toml",
]
