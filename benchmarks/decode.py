"""`kda-jax bench` from a checkout, where nothing is installed: python benchmarks/decode.py --help."""

import argparse
import sys

from kda_jax.tools import bench

parser = argparse.ArgumentParser(
    description=bench.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
bench.add_arguments(parser)
sys.exit(bench.run(parser.parse_args()))
