"""Refuses overrides that Hydra would drop in silence, or stumble on without naming them; raises `ConfigError`."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig

from cbexp.cli.composer import Composer, parse_overrides
from cbexp.cli.config_errors import explain_choice
from cbexp.config import SWEEP_SETTINGS
from cbexp.errors import ConfigError


def refuse_repeated_keys(overrides: Sequence[str]) -> None:
    """Refuse a command line that sets one key twice, of which Hydra would take the last in silence."""
    first: dict[str, str] = {}
    for text in overrides:
        key = text.lstrip("+").partition("=")[0].strip()
        if key in first:
            raise ConfigError(
                f"{first[key]} {text}: {key} is given twice. Keep one; several values of a sweep are "
                f"{key}=a,b with -m."
            )
        if key:  # a text without one is refused for that
            first[key] = text


def refuse_broken_text(overrides: list[str]) -> None:
    """Refuse text that is no UTF-8, and text that names no setting."""
    for text in overrides:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{text!r} is no valid UTF-8: no record could hold it.") from error
        if not text.partition("=")[0].strip():
            raise ConfigError(f"{text!r}: settings are written as key=value.")


def refuse_unnamed_choices(overrides: list[str], composer: Composer) -> None:
    """Refuse `model=null`, `model=3` and `model=[a,b]`, on which Hydra stumbles without naming the group."""
    for override in parse_overrides(overrides):
        is_named = override.is_sweep_override() or isinstance(override.value(), str)
        if is_named or override.is_delete():
            continue
        choices = composer.list_choices(override.key_or_group)
        if choices:
            value = override.get_value_element_as_str()
            raise ConfigError(explain_choice(override.key_or_group, value, choices))


def refuse_entry_of_no_sweep(overrides: list[str], composer: Composer) -> None:
    """Refuse `hydra.sweeper.params.seed='1,2'` where no yaml lists a sweep: Hydra has nothing to put it into."""
    prefix = "hydra.sweeper.params."
    entries = [
        override for override in parse_overrides(overrides) if override.key_or_group.startswith(prefix)
    ]
    given = {override.input_line for override in entries}
    if not entries:
        return
    common = composer.compose_common([text for text in overrides if text not in given])
    if common.hydra.sweeper.params is None:
        setting = f"{entries[0].key_or_group.removeprefix(prefix)}={entries[0].value()}"
        raise ConfigError(
            f"{entries[0].input_line}: there is no sweep to change. Write -m {setting} instead."
        )


def refuse_sweep(overrides: list[str], common: DictConfig) -> None:
    """Refuse several values, and settings of a sweep, where the command is of a single run."""
    for override in parse_overrides(overrides):
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line}: several values are a sweep: add -m. A list is written [a,b]."
            )
        if override.get_key_element() in SWEEP_SETTINGS:
            raise ConfigError(
                f"{override.input_line}: this is a setting of a sweep, and there is none: give the sweep's whole "
                "command, with -m, or remove it."
            )
    if common.hydra.sweeper.params:
        raise ConfigError("hydra.sweeper.params lists a sweep, but this is no multirun: add -m.")
