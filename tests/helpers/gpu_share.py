"""How much of a GPU's memory a test process may take; imported before JAX is.

Workers share a GPU, and each keeps the memory that it once had. So each has a share: 15 workers
leave room for one process of a large pool.
"""

import os

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
SHARE, LARGE_SHARE = "0.05", "0.14"

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if IS_WORKER:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", SHARE)
