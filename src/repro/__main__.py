"""`repro`, and `python -m repro` where the console script is not on PATH (inside Snakemake jobs)."""

import sys


def main() -> None:
    """The command line; exit code 2 where only the engines were installed."""
    try:
        from repro.cli import app
    except ModuleNotFoundError as error:
        if (error.name or "repro").partition(".")[0] == "repro":
            raise
        print(f"error: the command line needs {error.name}: pip install 'repro-papers[workflow]'", file=sys.stderr)
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()
