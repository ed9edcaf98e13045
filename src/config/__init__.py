"""Configuration: values (YAML files), types and ranges (`schema`), facts of an environment (`env_info`). No torch."""
