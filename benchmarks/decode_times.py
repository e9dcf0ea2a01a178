"""`kda-jax bench` from a checkout, where nothing is installed."""

import argparse
import sys

from kda_jax.tools import bench


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=bench.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    bench.add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        return bench.run(options)
    except ValueError as error:
        return parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
