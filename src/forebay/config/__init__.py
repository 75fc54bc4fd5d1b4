"""Typed configuration: recipes, files, overrides, rules, and the source of every value. Imports no torch."""

from forebay.config.dump import dump
from forebay.config.resolve import Resolved, resolve
from forebay.config.rules import Violation, validate, violations
from forebay.config.schema import (
    CheckpointConfig,
    Config,
    DatasetConfig,
    LoggerConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "DatasetConfig",
    "LoggerConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Resolved",
    "TrainConfig",
    "Violation",
    "dump",
    "resolve",
    "validate",
    "violations",
]
