"""A bundle: one tar archive with source, records, figures, report, environment, checksums and metadata.

`contents.make` writes it from a clean checkout, bit for bit the same for the same commit and records. `unpack` checks
one from anywhere and unpacks it, whole or not at all.
"""

from repro.bundle.archive import BundleError
from repro.bundle.unpack import unpack

__all__ = ["BundleError", "unpack"]
