"""One OpenBLAS thread for each of several test processes; imported before OpenBLAS is loaded."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
