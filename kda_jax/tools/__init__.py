"""What is not the product: the command line, the demo, benchmarks, and what tests run on."""
