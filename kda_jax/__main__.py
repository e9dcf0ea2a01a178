"""`python -m kda_jax`: the command line."""

import sys

from kda_jax.tools.cli import main

sys.exit(main())
