"""What several experiments use. Modules without an engine in their imports may be imported by an experiment's `__init__`."""
