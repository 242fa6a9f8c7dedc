"""Models that the engines run. Nothing is imported here: each module brings its own heavy libraries."""
