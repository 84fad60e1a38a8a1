"""Two graphs are the same, to the bit."""

import numpy as np

from lightning_gnn_dist import Graph


def check_equal(found: Graph, expected: Graph) -> None:
    assert found.fingerprint == expected.fingerprint and found.arrays.keys() == expected.arrays.keys()
    assert found.types.about == expected.types.about
    for name, array in expected.arrays.items():
        assert found.arrays[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found.arrays[name].double(), array.double(), name)  # NaN equals NaN
