"""The command ``kvass blend``: stores documents that prompts may contain anywhere, and measures
what that costs answers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from kvass.cli.daemon import add_daemon
from kvass.config import CONNECTION, Parser, load
from kvass.errors import ConfigError

WAYS: Final = (
    "none",
    *("first_k:8", "first_k:16", "first_k:32"),
    *("kv_dev:0.05", "kv_dev:0.15", "kv_dev:0.3"),
    "all",
)


def run(argv: list[str]) -> int:
    """Store documents, or measure answers. Raises ``Unavailable`` if there is no daemon,
    ``UsageError`` for a model or a file that cannot be used."""
    parser = Parser(
        prog="kvass blend",
        description="Prompts that contain documents anywhere: store these documents, or measure "
        "what answers lose. 'kvass blend add --help' and 'kvass blend quality --help' say more.",
    )
    parser.add_argument("action", choices=["add", "quality"], help="what to do")
    action = parser.parse_args(argv[:1]).action
    return {"add": add, "quality": quality}[action](argv[1:])


def add(argv: list[str]) -> int:
    """Compute documents with transformers and store them, so that prompts may blend them."""
    parser = Parser(
        prog="kvass blend add",
        description="Compute documents with a model of transformers and store them, for prompts in "
        "which they stand anywhere. Those prompts must be computed with the same model, data type, "
        "attention and chunk size, on the same kind of device.",
    )
    add_daemon(parser)
    parser.add_argument("files", nargs="+", metavar="FILE", help="documents: text in UTF-8")
    _add_model(parser)
    flag = parser.add_argument
    flag(
        "--chunk-tokens", default=0, type=int, metavar="N", help="tokens of a chunk (default: 256)"
    )
    flag("--tag", default="", metavar="TEXT", help="tag of the namespace, as for connect")
    flag(
        "--salt", default="", metavar="TEXT", help="salt of the prompts that may use the documents"
    )
    options = vars(parser.parse_args(argv))
    names = ("files", "model", "dtype", "attention", "chunk_tokens", "tag", "salt")
    own = {name: options.pop(name) for name in names}
    config = load(options, os.environ, wanted=CONNECTION)
    texts = {file: _read(Path(file)) for file in own["files"]}
    try:  # slow to import, and installed only with an extra
        from kvass.connectors.transformers import documents
    except ImportError as error:
        raise ConfigError(f"{error}: pip install 'kvass[transformers]'") from None
    terms = {"socket": config.socket, "daemon_uid": config.daemon_uid}
    terms |= {name: own[name] for name in ("chunk_tokens", "tag")}
    for name, found, tokens in documents.add(
        own["model"], _loading(own), texts, own["salt"], **terms
    ):
        print(f"{name}: {found} of {tokens} tokens can be found", flush=True)
    return 0


def quality(argv: list[str]) -> int:
    """Print what each way of blending costs answers, and saves."""
    parser = Parser(
        prog="kvass blend quality",
        description="Print how near answers with blend are to those of a full prefill, with your "
        "model and your texts. It needs no daemon. The time is that of computing a prompt, as a "
        "share of a full prefill's.",
    )
    _add_model(parser)
    flag = parser.add_argument
    flag("--documents", required=True, metavar="DIR", help="texts in UTF-8: all files in it")
    flag(
        "--blend",
        action="append",
        metavar="SELECTOR",
        help=f"a way to measure, any number of times (default: {', '.join(WAYS)})",
    )
    flag("--prompts", default=12, type=int, metavar="N", help="prompts (default: 12)")
    flag("--segments", default=6, type=int, metavar="N", help="segments of a prompt (default: 6)")
    flag("--segment-tokens", default=256, type=int, metavar="N", help="of each (default: 256)")
    flag("--answer-tokens", default=32, type=int, metavar="N", help="compared (default: 32)")
    own = vars(parser.parse_args(argv))
    shape = tuple(own[n] for n in ("prompts", "segments", "segment_tokens", "answer_tokens"))
    if min(shape) < 1:
        raise ConfigError("prompts, segments and tokens: give 1 or more of each")
    folder = Path(own["documents"])
    texts = {str(f): _read(f) for f in sorted(folder.glob("*")) if f.is_file()}
    if not texts:
        raise ConfigError(f"--documents {folder}: it is no folder with files")
    try:  # as above
        from kvass.connectors.transformers import quality as measured
    except ImportError as error:
        raise ConfigError(f"{error}: pip install 'kvass[transformers]'") from None
    ways = own["blend"] or WAYS
    shaped, shown = measured.Shape(*shape), ""
    for lines in measured.measure(own["model"], _loading(own), texts, ways, shaped):
        print(".", end="", file=sys.stderr, flush=True)
        shown = measured.table(lines)
    print(f"\n{shown}")
    return 0


def _add_model(parser: Parser) -> None:
    flag = parser.add_argument
    flag(
        "--model", required=True, metavar="PATH", help="the model's folder, or its name on the Hub"
    )
    flag(
        "--dtype",
        default="auto",
        metavar="TYPE",
        help="data type, as for from_pretrained (default: auto)",
    )
    flag(
        "--attention",
        default="sdpa",
        metavar="NAME",
        help="attention: sdpa or eager (default: sdpa)",
    )


def _loading(own: dict[str, object]) -> dict[str, object]:
    return {"dtype": own["dtype"], "attn_implementation": own["attention"]}


def _read(file: Path) -> str:
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from None
    if not text.strip():
        raise ConfigError(f"{file}: it is empty")
    return text
