"""What a run is told: values (YAML), their types and ranges (schema), and the facts of an environment. No torch."""
