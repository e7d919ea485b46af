"""The command ``kvass blend``: stores documents that prompts may contain anywhere, and measures
what that costs answers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

from kvass.cli.daemon import add_daemon
from kvass.config import CONNECTION, Config, Parser, load
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
        description="add: compute documents with a model of transformers and store them, for "
        "prompts in which they stand anywhere. Those prompts must be computed with the same model, "
        "data type, attention and chunk size, on the same kind of device. quality: print how near "
        "answers with blend are to those of a full prefill, with your model and texts, and how "
        "long a prompt takes, as a share of a full prefill. It asks no daemon.",
    )
    add_daemon(parser)
    flag = parser.add_argument
    flag("action", choices=["add", "quality"], help="what to do")
    flag("files", nargs="*", metavar="FILE", help="add: documents, text in UTF-8")
    flag("--model", required=True, metavar="PATH", help="the model's folder, or name on the Hub")
    flag(
        "--dtype",
        default="auto",
        metavar="TYPE",
        help="data type, as for from_pretrained (default: auto)",
    )
    flag("--device", default="cpu", metavar="NAME", help="of torch: cpu, cuda (default: cpu)")
    flag(
        "--attention",
        default="sdpa",
        choices=["sdpa", "eager"],
        metavar="NAME",
        help="attention: sdpa or eager (default: sdpa)",
    )
    _add_flags(parser)
    own = vars(parser.parse_intermixed_args(argv))
    options = {name: own.pop(name) for name in CONNECTION}
    if own["action"] == "quality":
        return _quality(own)
    return _add(own, load(options, os.environ, wanted=CONNECTION))


def _add_flags(parser: Parser) -> None:
    """What only one of the actions takes."""
    flag = parser.add_argument
    flag("--chunk-tokens", default=0, type=int, metavar="N", help="add: of a chunk (default: 256)")
    flag("--tag", default="", metavar="TEXT", help="add: tag of the namespace, as for connect")
    flag("--salt", default="", metavar="TEXT", help="add: of the prompts that may use them")
    flag("--documents", metavar="DIR", help="quality: a folder with texts in UTF-8")
    flag(
        "--blend",
        action="append",
        metavar="SELECTOR",
        help=f"quality: what to measure, any number of times (default: {', '.join(WAYS)})",
    )
    for name, default, meaning in (
        ("--prompts", 12, "prompts"),
        ("--segments", 6, "segments of a prompt"),
        ("--segment-tokens", 256, "of each"),
        ("--answer-tokens", 32, "that are compared"),
    ):
        words = f"quality: {meaning} (default: {default})"
        flag(name, default=default, type=int, metavar="N", help=words)


def _add(own: dict[str, Any], config: Config) -> int:
    if not own["files"]:
        raise ConfigError("kvass blend add: name the documents; see kvass blend --help")
    texts = {file: _read(Path(file)) for file in own["files"]}
    try:  # slow to import, and installed only with an extra
        from kvass.connectors.transformers import documents
    except ImportError as error:
        raise ConfigError(f"{error}: pip install 'kvass[transformers]'") from None
    terms = {"socket": config.socket, "daemon_uid": config.daemon_uid}
    terms |= {name: own[name] for name in ("chunk_tokens", "tag")}
    added = documents.add(own["model"], _loading(own), texts, own["salt"], **terms)
    for name, found, tokens in added:
        print(f"{name}: {found} of {tokens} tokens can be found", flush=True)
    return 0


def _quality(own: dict[str, Any]) -> int:
    shape = [own[n] for n in ("prompts", "segments", "segment_tokens", "answer_tokens")]
    if min(shape) < 1:
        raise ConfigError("prompts, segments and tokens: give 1 or more of each")
    if own["files"] or own["documents"] is None:
        raise ConfigError("kvass blend quality: name a folder with texts by --documents, no files")
    texts = {str(f): _read(f) for f in sorted(Path(own["documents"]).glob("*")) if f.is_file()}
    if not texts:
        raise ConfigError(f"--documents {own['documents']}: it is no folder with files")
    try:  # as above
        from kvass.connectors.transformers import quality
    except ImportError as error:
        raise ConfigError(f"{error}: pip install 'kvass[transformers]'") from None
    ways, shown = own["blend"] or WAYS, ""
    for lines in quality.measure(own["model"], _loading(own), texts, ways, quality.Shape(*shape)):
        print(".", end="", file=sys.stderr, flush=True)
        shown = quality.table(lines)
    print(f"\n{shown}")
    return 0


def _loading(own: dict[str, Any]) -> dict[str, Any]:
    names = {"device": "device", "dtype": "dtype", "attention": "attn_implementation"}
    return {name: own[flag] for flag, name in names.items()}


def _read(file: Path) -> str:
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from None
    if not text.strip():
        raise ConfigError(f"{file}: it is empty")
    return text
