"""Names, defaults, units and checks of every setting; the one place where defaults live."""

from cbexp.cell_settings import SWEEP_SETTINGS
from cbexp.config.engine import CacheConfig, CompileConfig, DriverConfig, name_settings
from cbexp.config.experiment import (
    ISOLATIONS,
    MAX_SEED,
    ExperimentConfig,
    SweepInfo,
    from_plain_dict,
    to_plain_dict,
)
from cbexp.config.idle_settings import IdleSetting, find_idle_settings
from cbexp.config.model import ADAPTER_KINDS, BUILTIN_PREFIX, DTYPES, INITS, AdapterConfig, ModelConfig
from cbexp.config.records import TRACKING_MODES, ArtifactsConfig, TrackingConfig
from cbexp.config.schema import register_schema
from cbexp.config.workload import (
    DATASET_FIELDS_BY_KIND,
    DATASET_KINDS,
    MAX_SIGMA,
    VERIFIERS,
    DatasetConfig,
    SamplingConfig,
)

__all__ = [
    "ADAPTER_KINDS",
    "BUILTIN_PREFIX",
    "DATASET_FIELDS_BY_KIND",
    "DATASET_KINDS",
    "DTYPES",
    "INITS",
    "ISOLATIONS",
    "MAX_SEED",
    "MAX_SIGMA",
    "SWEEP_SETTINGS",
    "TRACKING_MODES",
    "VERIFIERS",
    "AdapterConfig",
    "ArtifactsConfig",
    "CacheConfig",
    "CompileConfig",
    "DatasetConfig",
    "DriverConfig",
    "ExperimentConfig",
    "IdleSetting",
    "ModelConfig",
    "SamplingConfig",
    "SweepInfo",
    "TrackingConfig",
    "find_idle_settings",
    "from_plain_dict",
    "name_settings",
    "register_schema",
    "to_plain_dict",
]
