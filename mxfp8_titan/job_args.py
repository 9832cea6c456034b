"""A job's command line and TOML as they are before torchtitan is imported, and the hook added to them.

torchtitan reads two of its flags by itself before it parses the rest, the first occurrence of each:
job.config_file and job.custom_config_module.
"""

import importlib
import sys
from dataclasses import field, fields, make_dataclass
from types import ModuleType
from typing import Any

import tomli

from mxfp8_titan.job_config import MX

CONFIG_MODULE = "mxfp8_titan.job_config"
MERGED_MODULE = "mxfp8_titan_merged_job_config"
"""Name under which a config module of the user's, with our section added, is found by torchtitan."""


def add_config_hook(args: list[str]) -> list[str]:
    """`args` with a --job.custom_config_module that has the [mx] section.

    A config module of the user's own, named by `args` or their TOML, keeps everything it has; where it lacks the
    section, a module with both is made for this process.

    Raises: ValueError or OSError as `read_toml` does, ImportError for a module that cannot be imported.
    """
    job = read_toml(args).get("job")
    named = flag_value(args, "job.custom_config_module") or (isinstance(job, dict) and job.get("custom_config_module"))
    if not named:
        return [f"--job.custom_config_module={CONFIG_MODULE}", *args]
    theirs = importlib.import_module(str(named)).JobConfig
    if any(f.name == "mx" for f in fields(theirs)):
        return list(args)
    merged = ModuleType(MERGED_MODULE)
    merged.JobConfig = make_dataclass("JobConfig", [("mx", MX, field(default_factory=MX))], bases=(theirs,))
    sys.modules[MERGED_MODULE] = merged
    return [f"--job.custom_config_module={MERGED_MODULE}", *args]


def read_toml(args: list[str]) -> dict[str, Any]:
    """The TOML that `args` name, or an empty one.

    Raises: ValueError for a file that is no TOML, OSError for one that cannot be read.
    """
    path = flag_value(args, "job.config_file")
    if path is None:
        return {}
    with open(path, "rb") as file:
        try:
            return tomli.load(file)
        except tomli.TOMLDecodeError as error:
            raise ValueError(f"{path} is no TOML: {error}") from None


def flag_value(args: list[str], key: str) -> str | None:
    """The value of the first --key in `args`, or None.

    Raises: ValueError as `flag_values` does.
    """
    return next(iter(flag_values(args, key)), None)


def flag_values(args: list[str], key: str) -> list[str]:
    """The values of every --key in `args`, in order; dashes and underscores alike.

    Raises: ValueError when the flag stands last, without a value.
    """
    values = []
    for index, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name.replace("-", "_") == f"__{key}":
            if not equals and index + 1 == len(args):
                raise ValueError(f"{arg} needs a value")
            values.append(value if equals else args[index + 1])
    return values
