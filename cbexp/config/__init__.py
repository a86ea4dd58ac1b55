"""Names, defaults, units and checks of every setting; the one place where defaults live."""

from cbexp.cell_settings import SWEEP_SETTINGS
from cbexp.config.defaults import list_changed_fields
from cbexp.config.engine import (
    BATCH_SHAPES,
    BLOCK_SHARING,
    COMPILE_MODES,
    COMPILE_MODES_WITH_LAYER_REGION,
    COMPILE_REGIONS,
    DRIVERS,
    FUSIONS,
    MAX_BUCKET,
    MAX_BURST,
    MAX_MEMORY_FRACTION,
    SCHEDULERS,
    CacheConfig,
    CompileConfig,
    DriverConfig,
    check_region,
)
from cbexp.config.experiment import (
    ISOLATIONS,
    MAX_SEED,
    ExperimentConfig,
    SweepInfo,
    from_plain_dict,
    to_plain_dict,
)
from cbexp.config.model import ADAPTER_KINDS, BUILTIN_PREFIX, DTYPES, INITS, AdapterConfig, ModelConfig
from cbexp.config.records import TRACKING_MODES, ArtifactsConfig, TrackingConfig
from cbexp.config.schema import register_schema
from cbexp.config.work import (
    DATASET_FIELDS_BY_KIND,
    DATASET_KINDS,
    MAX_SIGMA,
    VERIFIERS,
    DatasetConfig,
    SamplingConfig,
)

__all__ = [
    "ADAPTER_KINDS",
    "BATCH_SHAPES",
    "BLOCK_SHARING",
    "BUILTIN_PREFIX",
    "COMPILE_MODES",
    "COMPILE_MODES_WITH_LAYER_REGION",
    "COMPILE_REGIONS",
    "DATASET_FIELDS_BY_KIND",
    "DATASET_KINDS",
    "DRIVERS",
    "DTYPES",
    "FUSIONS",
    "INITS",
    "ISOLATIONS",
    "MAX_BUCKET",
    "MAX_BURST",
    "MAX_MEMORY_FRACTION",
    "MAX_SEED",
    "MAX_SIGMA",
    "SCHEDULERS",
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
    "ModelConfig",
    "SamplingConfig",
    "SweepInfo",
    "TrackingConfig",
    "check_region",
    "from_plain_dict",
    "list_changed_fields",
    "register_schema",
    "to_plain_dict",
]
