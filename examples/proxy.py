"""One address for several vLLM servers that share a kvass daemon.

Requests go to the servers in turn::

    python -m examples.proxy --port 8000 http://127.0.0.1:8001 http://127.0.0.1:8002

With ``--prefill`` each prompt goes to that server first, for one token. It computes the prompt and
stores it; the server whose answer the client gets then loads it::

    python -m examples.proxy --port 8000 --prefill http://127.0.0.1:8001 http://127.0.0.1:8002

A prefill server that fails or is gone costs the hit and nothing else: the next server computes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import cycle
from typing import Any, Final

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask

ANSWER_ONLY: Final = {"stream", "stream_options", "max_completion_tokens", "min_tokens", "n"}
"""What a request for one token leaves out."""


def proxy(servers: Sequence[str], prefill: str | None = None) -> FastAPI:
    """The application. The header ``x-served-by`` of an answer names the server that gave it."""
    app, turn = FastAPI(), cycle(servers)
    client = httpx.AsyncClient(timeout=None, trust_env=False)

    @app.post("/{path:path}")
    async def forward(path: str, request: Request) -> StreamingResponse:
        body = await request.json()
        if prefill is not None:
            try:
                await client.post(f"{prefill}/{path}", json=for_one_token(body))
            except httpx.HTTPError:
                pass  # as the text at the top says
        server = next(turn)
        message = client.build_request("POST", f"{server}/{path}", json=body)
        reply = await client.send(message, stream=True)
        headers = {"content-type": reply.headers["content-type"], "x-served-by": server}
        end = BackgroundTask(reply.aclose)
        return StreamingResponse(reply.aiter_raw(), reply.status_code, headers, background=end)

    return app


def for_one_token(body: dict[str, Any]) -> dict[str, Any]:
    """The same request, answered by one token."""
    return {name: field for name, field in body.items() if name not in ANSWER_ONLY} | {
        "max_tokens": 1
    }


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m examples.proxy")
    parser.add_argument("servers", nargs="+", metavar="URL", help="servers whose answers are sent")
    parser.add_argument("--prefill", metavar="URL", help="server that computes each prompt first")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    args = parser.parse_args()
    app = proxy(args.servers, args.prefill)
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
