"""Programs that serve a job, each run as a script by the interpreter of its environment; `protocol` is what they share."""
