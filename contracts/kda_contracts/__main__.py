"""`python -m kda_contracts`: the command line."""

import sys

from kda_contracts.cli import main

sys.exit(main())
