"""The configuration: parts, presets, files, --set; validated before anything runs."""

from fedmpi.config.loading import build_config, config_table, config_toml, key_descriptions, load_config
from fedmpi.config.parts import Config
from fedmpi.config.presets import Preset, presets

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
