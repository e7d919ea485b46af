"""The command ``kvass blend``: stores documents, so that prompts can contain them anywhere."""

from __future__ import annotations

import os
from pathlib import Path

from kvass.cli.daemon import add_daemon
from kvass.config import CONNECTION, Parser, load
from kvass.errors import ConfigError


def run(argv: list[str]) -> int:
    """Compute documents with transformers and store them, so that prompts may blend them. Raises
    ``Unavailable`` if there is no daemon, ``UsageError`` for a model or a file that cannot be used.
    """
    parser = Parser(
        prog="kvass blend",
        description="Compute documents with a model of transformers and store them, for prompts in "
        "which they stand anywhere. Those prompts must be computed with the same model, data type, "
        "attention and chunk size, on the same kind of device.",
    )
    add_daemon(parser)
    parser.add_argument("action", choices=["add"], help="what to do")
    parser.add_argument("files", nargs="+", metavar="FILE", help="documents: text in UTF-8")
    add = parser.add_argument
    add("--model", required=True, metavar="PATH", help="the model's folder, or its name on the Hub")
    add(
        "--dtype",
        default="auto",
        metavar="TYPE",
        help="data type, as for from_pretrained (default: auto)",
    )
    add(
        "--attention",
        default="sdpa",
        metavar="NAME",
        help="attention: sdpa or eager (default: sdpa)",
    )
    add("--chunk-tokens", default=0, type=int, metavar="N", help="tokens of a chunk (default: 256)")
    add("--tag", default="", metavar="TEXT", help="tag of the namespace, as for connect")
    add("--salt", default="", metavar="TEXT", help="salt of the prompts that may use the documents")
    options = vars(parser.parse_args(argv))
    names = ("action", "files", "model", "dtype", "attention", "chunk_tokens", "tag", "salt")
    own = {name: options.pop(name) for name in names}
    config = load(options, os.environ, wanted=CONNECTION)
    texts = {file: _read(file) for file in own["files"]}
    try:  # slow to import, and installed only with an extra
        from kvass.connectors.transformers import documents
    except ImportError as error:
        raise ConfigError(f"{error}: pip install 'kvass[transformers]'") from None
    loading = {"dtype": own["dtype"], "attn_implementation": own["attention"]}
    terms = {"socket": config.socket, "daemon_uid": config.daemon_uid}
    terms |= {name: own[name] for name in ("chunk_tokens", "tag")}
    for name, found, tokens in documents.add(own["model"], loading, texts, own["salt"], **terms):
        print(f"{name}: {found} of {tokens} tokens can be found", flush=True)
    return 0


def _read(file: str) -> str:
    try:
        text = Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from None
    if not text.strip():
        raise ConfigError(f"{file}: it is empty")
    return text
