"""One random number per sampled token, a pure function of the request's seed and the token's place.

A request's numbers so depend on nothing else that runs, and come again after a preemption.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: NDArray[np.int64], counters: NDArray[np.int32]) -> NDArray[np.float32]:
    """float32 [N] in [0, 1): output number `counters[i]` of a SplitMix64 generator that starts at `seeds[i]`.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    with np.errstate(over="ignore"):
        z = _mix(seeds.view(np.uint64)) + _GOLDEN * (counters.astype(np.uint64) + np.uint64(1))
        z = _mix(z)
    return ((z >> np.uint64(40)).astype(np.float32)) * np.float32(2.0**-24)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
