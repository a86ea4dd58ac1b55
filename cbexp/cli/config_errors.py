"""Says what is wrong with a configuration in the user's words, from what Hydra and OmegaConf raise."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from cbexp.checks import describe_near_matches
from cbexp.config import ExperimentConfig
from cbexp.errors import CbexpError

# Settings of earlier versions -> what to do instead.
_REMOVED = {"compile.region": "the whole model is always compiled. Remove it"}
_TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a mapping",
}
_INTERNAL_LINE = re.compile(r"\s*(full_key|object_type|reference_type)\b")
_YAML_FILE = re.compile(r"In '([^']+)': ")
_VALUE_FOR_GROUP = re.compile(r"is not a subclass of (\w+)Config\. value: (.*)")


def explain_error(error: BaseException, overrides: Sequence[str], groups: Mapping[str, Sequence[str]]) -> str:
    """Return a message with what is wrong, near matches and what is allowed.

    Args:
        error: what composing or converting a configuration raised.
        overrides: the command line's `key=value` arguments.
        groups: the choices of each configuration group.
    """
    for cause in _walk_causes(error):
        if isinstance(cause, CbexpError):
            return str(cause)
        if isinstance(cause, MissingConfigException) and cause.options is not None:
            return _explain_unknown_choice(str(cause.missing_cfg_file), cause.options)
        if isinstance(cause, OverrideParseException):
            return _explain_unreadable_override(cause)
        if misplaced := _explain_experiment(str(cause), groups):
            return misplaced
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            key = cause.full_key.partition("[")[0]
            return _locate(key, overrides, error) + _explain_key(key, cause, groups)
    return _first_lines(error)


def explain_unknown_setting(key: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Return what to write instead of the setting `key` (dotted), which does not exist."""
    if key.split(".")[0] == "hydra":
        return f"there is no setting {key}; python -m cbexp --hydra-help lists Hydra's own."
    if key in _REMOVED:
        return f"there is no setting {key} any more: {_REMOVED[key]}."
    parent, _, last = key.rpartition(".")
    if _find_type(parent) is dict or _is_inside_mapping(parent):
        return f"{parent} has no entry {last}; to add it, write ++{key}=..."
    known = list(dict.fromkeys([*_list_settings(ExperimentConfig), *groups]))
    hint = describe_near_matches(key, [name for name in known if name.count(".") >= key.count(".")])
    hint = hint or _describe_namesakes(last, known)
    allowed = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent]
    level = f" in {parent}" if parent else ""
    return f"there is no setting {key}.{hint}" + (
        f" Allowed{level}: {', '.join(allowed)}." if allowed else ""
    )


def explain_choice(group: str, choice: object, options: Sequence[str]) -> str:
    """Return what to write instead of `group=choice`."""
    hint = describe_near_matches(str(choice), options)
    return f"{group}={choice} is not a choice.{hint} Allowed: {', '.join(sorted(options))}."


def _walk_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_lines(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if not _INTERNAL_LINE.match(line)]
    return "\n".join(lines[:6]) or type(error).__name__


def _explain_experiment(message: str, groups: Mapping[str, Sequence[str]]) -> str | None:
    """What an experiment's yaml lacks, or has where it does not belong; None where that is not what is wrong."""
    in_yaml = _YAML_FILE.match(message)
    if in_yaml is None:
        return None
    place = in_yaml.group(1)
    value = _VALUE_FOR_GROUP.search(message)
    if value and value.group(1).lower() in groups:
        group, choice = value.group(1).lower(), value.group(2)
        return (
            f"{place}.yaml: {group} is a group of settings and not {choice}. To choose it, write under defaults: "
            f"- override /{group}: {choice}"
        )
    if place.startswith("experiment/") and "Key 'experiment' not in" in message:
        return f"{place}.yaml: begin it with the line '# @package _global_', for what it sets lies in other groups."
    return None


def _explain_unknown_choice(missing_file: str, options: Sequence[str]) -> str:
    group, _, choice = missing_file.rpartition("/")
    return explain_choice(group, choice, options)


def _explain_unreadable_override(error: OverrideParseException) -> str:
    if "missing EQUAL" in str(error):
        return f"{error.override}: settings are written as key=value."
    reason = str(error).strip().splitlines()[0]
    return f"{error.override}: cannot be read ({reason}). Quote special characters, as in 'key=\"value, with comma\"'."


def _locate(key: str, overrides: Sequence[str], error: BaseException) -> str:
    """Return where the setting `key` was given: in a yaml file, or by an override, which is quoted."""
    in_yaml = _YAML_FILE.match(str(error))
    if in_yaml:
        return f"{in_yaml.group(1)}.yaml: "
    quoted = [text for text in overrides if f"{text.lstrip('+~').partition('=')[0]}.".startswith(f"{key}.")]
    return f"{quoted[-1]}: " if quoted else ""


def _explain_key(key: str, error: OmegaConfBaseException, groups: Mapping[str, Sequence[str]]) -> str:
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return explain_unknown_setting(key, groups)
    if isinstance(error, MissingMandatoryValue):
        return f"{key} is not set."
    if isinstance(error, ValidationError):
        expected = _describe_type(_find_type(key))
        if expected:
            return f"{key} must be {expected}."
    return f"{key}: {str(error).splitlines()[0]}"


def _describe_namesakes(name: str, known: Sequence[str]) -> str:
    """Return the dotted settings whose last part is like `name`: `max_new_tokens` is `sampling.max_new_tokens`."""
    by_last_part = {key.rpartition(".")[2]: key for key in known}
    hint = describe_near_matches(name, by_last_part)
    return re.sub(r"'(\w+)'", lambda match: repr(by_last_part[match.group(1)]), hint)


def _list_settings(schema: Any, prefix: str = "") -> Iterator[str]:
    for key, hint in typing.get_type_hints(schema).items():
        yield prefix + key
        if dataclasses.is_dataclass(hint):
            yield from _list_settings(hint, f"{prefix}{key}.")


def _is_inside_mapping(parent: str) -> bool:
    return parent.count(".") > 1 and _find_type(".".join(parent.split(".")[:2])) is dict


def _find_type(key: str) -> Any:
    """Return the type of the setting `key`: a dataclass, a builtin, a generic alias, or None when there is none."""
    schema: Any = ExperimentConfig
    for part in key.split(".") if key else []:
        if not dataclasses.is_dataclass(schema):
            return None
        schema = typing.get_type_hints(schema).get(part)
    return dict if typing.get_origin(schema) is dict else schema


def _describe_type(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return f"{_describe_type(next(arg for arg in typing.get_args(hint) if arg is not types.NoneType))} or null"
    if typing.get_origin(hint) is list:
        plural = {int: "integers", str: "text"}[typing.get_args(hint)[0]]
        return f"a list of {plural}, as in [a,b]"
    return _TYPE_NAMES.get(hint, "")
