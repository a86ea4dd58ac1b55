"""The schema as Hydra knows it."""

from __future__ import annotations

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from cbexp.config.experiment import ExperimentConfig


def register_schema() -> None:
    """Register the schema in Hydra's ConfigStore under the name that `conf/config.yaml` starts from.

    What a model or dataset yaml must say itself is left open there, so that none inherits the built-in model's name.
    """
    schema = OmegaConf.structured(ExperimentConfig)
    schema.model.name = schema.dataset.name = MISSING
    schema.model.name_or_path = None
    ConfigStore.instance().store(name="cbexp_schema", node=schema)
