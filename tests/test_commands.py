"""Every command of kvass in the documents runs, or at least means what the program means by it.

Commands stand in fenced blocks and in indented lines. The real parser takes all their options, and
the real configuration their values. Those of ``ONLY_PARSED`` take minutes (``bench``) or serve
until Ctrl-C (``web`` and ``run``, which tests/web and tests/cli run), and some tiers need a server.
All others run, with paths of their own and little memory. ``tests/engine/test_recipes.py`` runs the
recipes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Final

import msgspec
import pytest

from kvass.cli.main import COMMANDS
from kvass.config import Config, EngineOptions, load
from kvass.errors import KvassError
from kvass.testing.daemon import running_daemon
from tests.site_tables import parser_of
from tests.test_documents import DOCS, ROOT

ONLY_PARSED: Final = ("bench", "web", "blend", "run", "export", "import")


def commands(text: str) -> Iterator[str]:
    """The lines of a document that begin with ``kvass``, without comments and prompts."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    shell = [block for kind, block in fenced if kind in ("", "sh", "console")]
    lines = [line for block in shell for line in block.replace("\\\n", " ").splitlines()]
    for line in lines + re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE):
        if re.match(r"(\$ )?kvass [a-z]", line):
            yield line.removeprefix("$ ").partition(" #")[0].rstrip("& ")


WRITTEN: Final = sorted({line for path in DOCS for line in commands(path.read_text())})


def options_of(line: str) -> dict[str, Any]:
    """What the real parser makes of a command. Raises ``ConfigError``."""
    _, command, *arguments = shlex.split(re.sub(r"[|<>] ?\S+", "", line))
    options = vars(parser_of(command).parse_args(arguments))
    if command == "serve":
        load({name: options[name] for name in Config.__struct_fields__}, {}, None)
    return options


@pytest.mark.parametrize("line", WRITTEN)
def test_a_command_has_options_and_values_that_there_are(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvass.config.memory_bytes", lambda: 1 << 40)
    monkeypatch.setattr("kvass.config.physical_bytes", lambda: 1 << 40)
    options_of(line)


def test_negative_control_a_wrong_option_or_value_is_seen() -> None:
    for line in ("kvass serve --l1 3", "kvass serve --tier floppy:/x", "kvass status --jsn"):
        with pytest.raises(KvassError):
            options_of(line)
    assert len(WRITTEN) > 10
    assert {line.split()[1] for line in WRITTEN} == set(COMMANDS)


def here(line: str, folder: Path) -> str:
    """``line`` with paths in ``folder`` and all sizes divided by 1024, if it takes memory."""
    if line.startswith("kvass simulate"):
        return line
    line = re.sub(r"/tmp/kvass-tier|/var/cache/kvass", f"{folder}/tier", line)
    line = re.sub(r"(?<![\w/])/(tmp|run/kvass|etc)/(?=kvass\b)", f"{folder}/", line)
    line = line.replace(" --huge-pages 2MiB", "")  # which root must have reserved
    line = re.sub(r"(\d+)MiB", r"\1KiB", line)
    line = re.sub(r"(\d+)GiB", r"\1MiB", line)
    return re.sub(r"(\d+)TiB", r"\1GiB", line).replace("127.0.0.1:9273", "127.0.0.1:0")


def run(line: str, folder: Path) -> str:
    """Run a command to its end, or until it is ready and told to end; what it printed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVASS_")}
    env["KVASS_SOCKET"] = str(folder / "kvass.sock")
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    stays = line.startswith("kvass serve") and "--print-config" not in line
    with subprocess.Popen(
        f"exec {line}", shell=True, text=True, env=env, stdout=subprocess.PIPE, cwd=folder
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        if stays:
            process.terminate()
        said += process.stdout.read()
    assert process.returncode == 0, line
    return said


def test_commands_that_serve_do(tmp_path: Path) -> None:
    """The options come from the file that the documents make first, the tokens from two files."""
    (tmp_path / "tier").mkdir()
    (tmp_path / "kvass").mkdir()
    for name in ("token", "read-token"):
        (tmp_path / "kvass" / name).touch(0o600)
        (tmp_path / "kvass" / name).write_text("0123456789abcdef")
    (tmp_path / "kvass" / "keys").touch(0o600)
    (tmp_path / "kvass" / "keys").write_text("00" * 32)
    (tmp_path / "kvass.yaml").write_text(f"socket: {tmp_path}/kvass.sock\nl1_size: 16MiB\n")
    serving = [line for line in WRITTEN if line.startswith("kvass serve ")]
    local = [line for line in serving if not re.search("redis:|s3:|mypkg", line)]
    assert len(local) > 3
    for line in local:
        said = run(here(line, tmp_path), tmp_path)
        assert said.startswith("ready ") or "--print-config" in line, line


def test_commands_that_ask_a_daemon_are_answered(tmp_path: Path) -> None:
    asking = [line for line in WRITTEN if line.split()[1] not in (*ONLY_PARSED, "serve")]
    (tmp_path / "disk").mkdir()
    tier = f"disk:{tmp_path}/disk?capacity=16MiB"
    with running_daemon(tmp_path, "64MiB", tier=[tier], quota=["batch=8MiB"]) as daemon:
        daemon.wait_until(l1_populated_bytes=64 << 20)
        for line in asking:
            once = " --times 1" if line.startswith("kvass top") else ""
            assert run(here(line, tmp_path) + once, tmp_path), daemon.log()
    commands = {line.split()[1] for line in asking}
    assert commands == {*COMMANDS} - {*ONLY_PARSED, "serve"}


class Answers(BaseHTTPRequestHandler):
    """A server of completions that answers with what it was asked for."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = f"{self.path} {asked['model']} {asked['prompt']} {asked.get('cache_salt')}"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"text": text}]}).encode())


def test_the_script_of_wrong_tokens_asks_with_a_salt_or_without(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "wrong-tokens.md").read_text()
    (block,) = re.findall(r"```sh\n(cat > ask\.py.*?)```", page, re.DOTALL)
    (tmp_path / "prompt.txt").write_text("Is it?")
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        said = subprocess.run(
            ["bash", "-ec", f"{block}\npython3 ask.py salt"],
            env={**os.environ, "MODEL": "m", "URL": url},
            cwd=tmp_path,
            text=True,
            capture_output=True,
            check=True,
        ).stdout
        server.shutdown()
    path = "'/v1/completions m Is it?"
    assert said.splitlines() == [f"{path} None'", f"{path} salt'"]


def test_the_connectors_options_in_the_documents_are_there() -> None:
    table = (ROOT / "docs" / "vllm.md").read_text()
    there = set(re.findall(r"^\| `(kvass\.\w+)` \|", table, re.MULTILINE))
    assert there == {f.encode_name for f in msgspec.structs.fields(EngineOptions)}
    settings = [
        json.loads(text)
        for path in [*DOCS, *(ROOT / "deploy").rglob("*.yml")]
        for text in re.findall(
            r"kv-transfer-config[ =]'?(\{[^']*?\}\})", path.read_text(), re.DOTALL
        )
    ]
    assert len(settings) >= 3
    for setting in settings:
        assert setting["kv_connector"] == "KvassConnector"
        assert set(setting["kv_connector_extra_config"]) <= there
