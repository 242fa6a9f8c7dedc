"""METIS 5.2 graph partitioning, called through its C interface: the Python packages know only one balance constraint.

The library comes with the PyPI package `cmeel-metis` (METIS is Apache-2.0 licensed; 32-bit indices), part of the extra
`benchmark`.
"""

import ctypes
import importlib.metadata
from functools import cache

import numpy as np
import scipy.sparse as sp

PACKAGES = ("cmeel-gklib", "cmeel-metis")  # in this order: the first must be loaded when the second is
OPTIONS = 40  # METIS_NOPTIONS, and places in this array, of metis.h 5.2.1
NITER, NCUTS, SEED, UFACTOR = 7, 8, 9, 18
OK = 1
LARGEST_TOTAL = 2**30  # of all edge weights: METIS adds them up in 32 bits


def part_graph(
    graph: sp.csr_array,
    vertex_weights: np.ndarray,
    parts: int,
    seed: int,
    cuts: int = 1,
    iterations: int = 50,
    imbalance: float = 0.001,
) -> np.ndarray:
    """int64 [n]: the part of each vertex, by k-way partitioning that minimises the weight of the edges cut.

    `graph`: symmetric [n, n], integer weights ≥ 1 that sum to less than 2³¹. `vertex_weights`: int [n, constraints];
    METIS tries to give every part the same sum of each column within `imbalance`, and may miss it. `cuts` partitions
    are tried, each with `iterations` of refinement. Raises ImportError when METIS is not installed.
    """
    library = _library()
    size, constraints = vertex_weights.shape
    if parts == 1:
        return np.zeros(size, np.int64)  # METIS divides by zero
    starts, neighbours, weights, balance = (
        np.ascontiguousarray(each, np.int32) for each in (graph.indptr, graph.indices, graph.data, vertex_weights)
    )
    options = np.empty(OPTIONS, np.int32)
    library.METIS_SetDefaultOptions(_pointer(options))
    options[[NITER, NCUTS, SEED, UFACTOR]] = iterations, cuts, seed % 2**31, round(1000 * imbalance)
    part, cut = np.zeros(size, np.int32), ctypes.c_int32()
    scalars = [ctypes.c_int32(number) for number in (size, constraints, parts)]
    status = library.METIS_PartGraphKway(
        ctypes.byref(scalars[0]),
        ctypes.byref(scalars[1]),
        *(_pointer(each) for each in (starts, neighbours, balance)),
        None,  # sizes of vertices: for another objective
        _pointer(weights),
        ctypes.byref(scalars[2]),
        None,  # all parts alike
        None,  # the imbalance allowed is in the options
        _pointer(options),
        ctypes.byref(cut),
        _pointer(part),
    )
    if status != OK:
        raise RuntimeError(f"METIS ended with status {status}")
    return part.astype(np.int64)


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


@cache
def _library() -> ctypes.CDLL:
    """Raises ImportError (its subclass PackageNotFoundError) where the package is missing."""
    for package in PACKAGES:
        files = importlib.metadata.files(package) or []
        (path,) = (file.locate() for file in files if file.suffix in (".so", ".dylib"))
        loaded = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return loaded
