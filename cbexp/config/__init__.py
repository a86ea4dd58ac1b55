"""Names, defaults, units and checks of every setting; the one place where defaults live."""

from cbexp.cell_settings import SWEEP_SETTINGS
from cbexp.config.engine import CacheConfig, CompileConfig, DriverConfig
from cbexp.config.experiment import (
    ExperimentConfig,
    SweepInfo,
    from_plain_dict,
    name_settings,
    to_plain_dict,
)
from cbexp.config.idle_settings import IdleSetting, find_idle_settings
from cbexp.config.model import BUILTIN_PREFIX, AdapterConfig, ModelConfig
from cbexp.config.records import TRACKING_MODES, ArtifactsConfig, RescoreConfig, TrackingConfig
from cbexp.config.schema import register_schema
from cbexp.config.workload import DATASET_KINDS, DatasetConfig, SamplingConfig

__all__ = [
    "BUILTIN_PREFIX",
    "DATASET_KINDS",
    "SWEEP_SETTINGS",
    "TRACKING_MODES",
    "AdapterConfig",
    "ArtifactsConfig",
    "CacheConfig",
    "CompileConfig",
    "DatasetConfig",
    "DriverConfig",
    "ExperimentConfig",
    "IdleSetting",
    "ModelConfig",
    "RescoreConfig",
    "SamplingConfig",
    "SweepInfo",
    "TrackingConfig",
    "find_idle_settings",
    "from_plain_dict",
    "name_settings",
    "register_schema",
    "to_plain_dict",
]
