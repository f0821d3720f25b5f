"""Typed configuration: one frozen struct an owner, read from TOML with dotted overrides."""

from molt.train.config.algorithm import (
    ESTIMATORS,
    GROUP_ESTIMATORS,
    AlgorithmConfig,
    CorrectionRule,
    CriticConfig,
    RewardConfig,
    compares_groups,
)
from molt.train.config.checks import check
from molt.train.config.data import DataConfig, DatasetConfig, EvalConfig
from molt.train.config.folders import cache_folder
from molt.train.config.load import known_keys, load_config, to_toml
from molt.train.config.optimizer import OptimizerConfig
from molt.train.config.pool import OutcomePolicy, PoolConfig
from molt.train.config.presets import correction_rule
from molt.train.config.sections import (
    ActorConfig,
    AgentConfig,
    ClusterConfig,
    Config,
    EngineConfig,
    GatewayConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    ServerConfig,
    SftConfig,
    TrainConfig,
)

__all__ = [
    "ESTIMATORS",
    "GROUP_ESTIMATORS",
    "ActorConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "ClusterConfig",
    "Config",
    "CorrectionRule",
    "CriticConfig",
    "DataConfig",
    "DatasetConfig",
    "EngineConfig",
    "EvalConfig",
    "GatewayConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OutcomePolicy",
    "PoolConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "ServerConfig",
    "SftConfig",
    "TrainConfig",
    "cache_folder",
    "check",
    "compares_groups",
    "correction_rule",
    "known_keys",
    "load_config",
    "to_toml",
]
