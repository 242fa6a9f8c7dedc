"""What several experiments use. The `__init__` of an experiment may import those modules that import no engine."""
