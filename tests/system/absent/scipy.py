"""Hides SciPy, which scikit-learn installs for tests, from programs that tests start.

dptrain does not need it, but Numba imports it if it can: 0.28 s of the CPU time of each process
(Intel Xeon with AVX-512, 2 cores, both busy).
"""

raise ImportError("SciPy is hidden from this test")
