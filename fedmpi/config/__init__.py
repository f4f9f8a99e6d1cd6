"""The configuration: tables, presets, files, --set; validated before anything runs."""

from fedmpi.config.keys import key_descriptions
from fedmpi.config.loading import Config, Preset, build_config, load_config, presets
from fedmpi.config.writing import config_table, config_toml

__all__ = [
    "Config",
    "Preset",
    "build_config",
    "config_table",
    "config_toml",
    "key_descriptions",
    "load_config",
    "presets",
]
