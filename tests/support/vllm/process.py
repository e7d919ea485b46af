"""A real vLLM engine in a child process, driven by JSON lines.

This is the parent's half, which imports neither vLLM nor torch; ``child`` is the other half. Each
command is one line on the child's stdin, ``{"op": ..., ...}``, and is answered by one line,
``{"ok": ...}`` or ``{"error": text}``. What vLLM prints goes to ``log``.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from kvass import Client
from tests.support.template import Forked, Template

ENVIRONMENT: Final[Mapping[str, str]] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # on CUDA vLLM 0.33 imports it also where it is not
}
OFF: Final = "kvass.off"
"""Of a request: see ``switched.py``."""
FAKE_GPU: Final = "tests.support.vllm.fake_gpu_connector"
STORE_TRIES: Final = 5
COMMIT_S: Final = 60.0
"""How long a store may take; a loaded machine copies slowly."""


class Prompt(msgspec.Struct, frozen=True):
    """One greedy request. ``tokens`` are token ids; ``salt`` is vLLM's ``cache_salt``."""

    tokens: list[int]
    max_tokens: int = 8
    salt: str | None = None
    lora: str | None = None
    """Folder of a LoRA adapter; its name is the folder's."""
    lora_id: int = 0
    """vLLM's ``lora_int_id``; 0: one that follows from its name."""
    lora_in_place: bool = False
    """vLLM's ``load_inplace``."""
    skip_prefix_cache: bool = False
    params: dict[str, Any] | None = None
    """vLLM's ``kv_transfer_params``."""
    joins: int = 0
    """It is added once each prompt before it has generated so many tokens, or has ended."""
    at_s: float = 0.0
    """It comes so long after the first one. Its times begin then, also if a step goes on."""
    aborts: int = 0
    """It is aborted after so many steps, unless it has ended; 0: never. Its answer has no tokens
    then, and ``finish_reason`` is ``abort``."""


class Answer(msgspec.Struct, frozen=True):
    """The result of a prompt. Times are seconds since the request was added."""

    tokens: list[int]
    logprobs: list[float]
    local: int
    """Prompt tokens found in vLLM's own prefix cache."""
    external: int
    """Prompt tokens that the connector promised (including loads that failed)."""
    first_token_s: float
    total_s: float
    finish_reason: str | None = None
    hooks_s: float = 0.0
    """The part of ``total_s`` in hooks of the connector, if ``transfer`` named it."""
    first_token_steps: int = 0
    """The engine's steps until the first token, those that computed nothing among them."""
    first_token_hooks_s: float = 0.0
    """As ``hooks_s``, of ``first_token_s``."""

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed."""
        return self.local + self.external


class Hooks(msgspec.Struct, frozen=True):
    """Times of the connector's hooks since the last ``reset_hooks``, in seconds, without the time
    in which the machine ran none of the engine's threads that were ready to run."""

    longest_s: dict[str, float]
    calls: dict[str, int]
    told_none_s: float
    """The longest time from a request's first ``None`` to its answer."""
    told_none: int
    """Requests that were told ``None`` at least once."""
    preemptions: int
    """How often vLLM preempted a running request."""

    @property
    def longest(self) -> float:
        """The longest call of any hook."""
        return max(self.longest_s.values(), default=0.0)


class Settings(msgspec.Struct, frozen=True):
    """How the copies of a rank are disturbed or watched."""

    copy_delay_s: float = 0.0
    """Every row takes this much longer."""
    ahead_s: float = 0.0
    """Its clock runs ahead; with a large value every copy misses its deadline."""
    late_in_step: bool = False
    """Loads inside a step are late, and no other copy is."""
    spoil: bool = False
    """Loaded pages are zeroed."""
    spoil_group: int | None = None
    """Loaded pages of this layer group are zeroed."""
    watch: bool = False
    """Digests of ``pages`` are kept."""
    late_stores: int = 0
    """Stores begin so many steps later, from blocks that are not held. Copies are not verified
    then."""
    broken_gpu: str = ""
    """The fault of its fake GPU (``engine_mover.Break``). Its copies are not verified then."""
    flip: str = ""
    """One byte of each copy of this kind is flipped, in its target, before it is verified."""
    flip_group: int = 0
    """The layer group of ``flip``."""

    def spoils(self, group: int) -> bool:
        """Whether pages of ``group`` are zeroed."""
        return self.spoil or self.spoil_group == group


class Pages(msgspec.Struct, frozen=True):
    """Digests of the blocks that a rank stored or loaded since ``reset_hooks``, in token order: as
    they were before each store and after each load."""

    stored: list[str]
    loaded: list[str]


class SeenStep(msgspec.Struct):
    """What a step did (``step_log.py``). Requests have vLLM's own names."""

    began_s: float = 0.0
    """CLOCK_MONOTONIC, as it began to be planned."""
    took_s: float = 0.0
    free_blocks: int = 0
    """As it began to be planned."""
    asked: dict[str, int | None] = {}
    """The connector's last answer about each request; None: it is to be asked again."""
    loads: dict[str, int] = {}
    """The tokens of each load that began."""
    computed: dict[str, int] = {}
    """The tokens of each request that it computed."""
    loaded: list[str] = []
    """The requests whose asynchronous load ended, as the workers reported with its result."""
    ended: list[str] = []
    """The requests that ended with it."""


class CacheGroup(msgspec.Struct, frozen=True):
    """A KV cache group of vLLM: its layers' spec classes and its block size. ``pages``: for each
    layer the bytes of a page and the stride between blocks."""

    specs: list[str]
    block_tokens: int
    layers: int
    pages: list[tuple[int, int]] = []


class EngineDied(Exception):
    """The child ended or did not answer in time; the text has the end of its log."""


class EngineProcess:
    """One vLLM engine. ``socket`` None runs it without kvass.

    ``args`` are vLLM's ``EngineArgs``; ``options`` the connector's extra config. ``patient``: steps
    wait for the daemon's answers without a timeout; with ``late`` not for grants, which come in a
    later step. ``layout_only``: it will never compute, so it needs no kernels of its model.
    ``gpu``: its pages are on a fake GPU (``fake_gpu_connector``). ``module``: of another
    ``KvassConnector``. ``transfer``: vLLM's
    ``kv_transfer_config`` of any connector, which nothing then measures or disturbs; with
    ``python``, in another interpreter. ``variables``: environment variables that no import reads;
    ``KVASS_SOCKET`` among them names ``socket`` instead of the options. The constructor returns at
    once; the first call waits until the engine is up.
    """

    all_on_gpu: ClassVar[bool | None] = None
    """If not None, it replaces ``gpu`` for every engine."""
    child: ClassVar[str] = "tests.support.vllm.child"
    template: ClassVar[Template | None] = None
    """Forks engines that have no ``environment`` of their own; these fork their ranks."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        socket: Path | None = None,
        args: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        start_timeout_s: float = 600.0,
        patient: bool = False,
        late: bool = False,
        layout_only: bool = False,
        gpu: bool = False,
        module: str = "",
        transfer: Mapping[str, Any] | None = None,
        python: str = sys.executable,
    ) -> None:
        config: dict[str, Any] = {"model": str(model), "args": dict(args or {})}
        config |= {"patient": patient, "late": late, "layout_only": layout_only}
        gpu = gpu if self.all_on_gpu is None else self.all_on_gpu
        config["module"] = module or (FAKE_GPU if gpu else "kvass.connectors.vllm")
        if socket is not None:
            # tests ``reset`` vLLM's own cache, so that the next hit comes from kvass
            named = {} if "KVASS_SOCKET" in (variables or {}) else {"kvass.socket": str(socket)}
            config["connector"] = {**named, "kvass.fixed_weights": True, **(options or {})}
        if transfer is not None:
            config["transfer"] = dict(transfer)
        self._log = log
        self._sockets = [socket] if socket is not None else []
        """Of the daemons that its ranks use."""
        self._buffer = b""
        self._ranks: list[int] = []
        self._workers: dict[int, str] = {}
        """The child's processes, each with its start time, because pids are reused."""
        self._start_timeout_s = start_timeout_s
        self._ready = False
        self._child: subprocess.Popen[bytes] | Forked
        env = {**os.environ, **ENVIRONMENT, **(environment or {}), **(variables or {})}
        with log.open("wb") as stderr:
            if self.template is not None and environment is None:
                config["fork_ranks"] = True
                command = [self.child, json.dumps(config)]
                self._child = self.template.fork(command, env, stderr.fileno())
            else:
                self._child = subprocess.Popen(
                    [python, "-m", self.child, json.dumps(config)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=env,
                )

    @property
    def pid(self) -> int:
        """The child's: the scheduler and, if there is one rank, the worker."""
        return self._child.pid

    @property
    def uses_kvass(self) -> bool:
        """Whether it has a daemon."""
        return bool(self._sockets)

    @property
    def ranks(self) -> list[int]:
        """The process ids of the workers, by rank."""
        if not self._ranks:
            self._ranks = [int(pid) for pid in self.call("ranks")]
        return self._ranks

    def wait_ready(self) -> EngineProcess:
        """Wait until the engine answers. :raises EngineDied: if it does not come up."""
        if not self._ready:
            self._read(self._start_timeout_s)
            self._ready = True
            self._workers = children(self.pid)
        return self

    def wait_connected(self, timeout_s: float = COMMIT_S) -> EngineProcess:
        """Wait until its daemon knows it: before that it computes all, and stores nothing. Raises
        EngineDied."""
        until_s = time.monotonic() + timeout_s
        while not self.call("connected"):
            if time.monotonic() > until_s:
                raise self._died(f"was not connected within {timeout_s:g} s")
            time.sleep(0.005)
        return self

    def generate(self, *prompts: Prompt, timeout_s: float = 300.0) -> list[Answer]:
        """Run the prompts together, greedily, to the end; answers in the same order."""
        self.submit(*prompts)
        return self.answers(timeout_s)

    def one(self, tokens: Sequence[int], max_tokens: int = 8, **fields: Any) -> Answer:
        """``generate`` for a single prompt."""
        return self.generate(Prompt(list(tokens), max_tokens, **fields))[0]

    def store(self, *prompts: Prompt) -> list[Answer]:
        """``generate``, and wait until the daemon has all that these prompts leave; the answers.

        A busy machine may lose stores. Then vLLM's own cache is emptied and the prompts run again,
        but the answers are the first ones.
        """
        answers: list[Answer] = []
        for _ in range(STORE_TRIES):
            lost = self._lost_stores()
            again = self.generate(*prompts)
            answers = answers or again
            if self._lost_stores() == lost:
                return answers
            assert self.reset()
        raise AssertionError(f"{STORE_TRIES} times something was not stored")

    def _lost_stores(self) -> int:
        """Wait until nothing is being written. How many stores were lost until now: discarded by
        a daemon, or never offered by this engine."""
        until_s, lost = time.monotonic() + COMMIT_S, 0
        for socket in self._sockets:
            with Client(str(socket)) as client:
                while (status := client.status(COMMIT_S))["reservations"]:
                    assert time.monotonic() < until_s, f"still being written: {status}"
                    time.sleep(0.005)
            counters: dict[str, int] = status["counters"]
            lost += sum(n for name, n in counters.items() if name.startswith("discarded_"))
        return lost + int(self.call("unstored"))

    def submit(self, *prompts: Prompt) -> None:
        """Start ``generate`` without waiting; ``answers`` must follow before anything else."""
        self._send("generate", prompts=msgspec.to_builtins(prompts))

    def answers(self, timeout_s: float = 300.0) -> list[Answer]:
        """Wait for what ``submit`` started."""
        return msgspec.convert(self._read(timeout_s), list[Answer])

    def leave(self, *prompts: Prompt, asks: bool = True, first: bool = False) -> None:
        """Run the prompts, and make no step after the last answer; with ``asks``, while vLLM says
        that something is unfinished (as ``LLM.generate`` does); with ``first`` no step after the
        first token."""
        self.call("leave", prompts=msgspec.to_builtins(prompts), asks=asks, first=first)

    def reset_at_once(self, *, running: bool = False) -> bool:
        """Clear vLLM's own prefix cache without a step before, with ``running`` also below running
        requests. False if a block was still held."""
        return bool(self.call("reset_at_once", running=running))

    def reset(self, *, connector: bool = False) -> bool:
        """Drain, then clear vLLM's own prefix cache; with ``connector`` kvass's as well.

        False if a block was still held.
        """
        return bool(self.call("reset", connector=connector))

    def blend(self, select: str = "none", control: str = "") -> dict[str, int]:
        """``instruments.BlendControls.set``."""
        counts: dict[str, int] = self.call("blend", select=select, control=control)
        return counts

    def load_in_steps(
        self, always: bool = True, *, own_recovery: bool = False, at_most: int = 256
    ) -> None:
        """With ``always`` load all hits inside steps, also while copies are not verified, and
        compute ``at_most`` tokens of a request in a step (0: any number). ``own_recovery``: vLLM
        handles loads that fail as it does without kvass."""
        self.call("load_in_steps", always=always, own_recovery=own_recovery, at_most=at_most)

    def in_step(self) -> list[int]:
        """How many loads each rank has copied inside steps."""
        return [int(count) for count in self.call("in_step")]

    def hooks(self) -> Hooks:
        """Times of the connector's hooks since ``reset_hooks``."""
        return msgspec.convert(self.call("hooks"), Hooks)

    def steps(self) -> list[SeenStep]:
        """Its steps since the last call; the first call begins to log them."""
        return msgspec.convert(self.call("steps"), list[SeenStep])

    def reset_hooks(self) -> None:
        """Forget all times; disarm every signal; disturb and watch nothing."""
        self.call("reset_hooks")

    def arm(
        self,
        hook: str,
        when: str,
        signals: Sequence[tuple[int, int, float]],
        *,
        rank: int | None = None,
    ) -> None:
        """At the next call of ``hook``, ``before`` or ``after`` it, send (pid, signal, after_s).

        Sent from the scheduler's process (also that of a single rank), or from that of ``rank``.
        """
        fields: dict[str, Any] = {"hook": hook, "when": when, "signals": [list(s) for s in signals]}
        if rank is None:
            self.call("arm", **fields)
        else:
            self.call("arm_rank", rank=rank, **fields)

    def disturb(self, settings: Settings, *, rank: int | None = None) -> None:
        """Disturb or watch the copies of ``rank``, or of all, from now on."""
        self.call("disturb", rank=rank, settings=msgspec.to_builtins(settings))

    def verify_again(self) -> None:
        """Forget that copies were verified, and that one was wrong: as after a start."""
        self.call("verify_again")

    def log(self) -> str:
        """What it has logged."""
        return self._log.read_text(errors="replace")

    def slow_copies(self, seconds: float) -> None:
        """Make every row that any rank copies take this much longer."""
        self.disturb(Settings(copy_delay_s=seconds))

    def add_lora(self, lora: Path, lora_id: int = 0, *, in_place: bool = False) -> None:
        """Have the workers load the LoRA adapter in the folder ``lora``, as a server does when it
        is told of it. ``lora_id``: as in ``Prompt``."""
        prompt = Prompt([], lora=str(lora), lora_id=lora_id, lora_in_place=in_place)
        self.call("add_lora", prompt=msgspec.to_builtins(prompt))

    def replace_weights(self, by: int, *, unseen: bool = False) -> None:
        """Replace weights in place, as a trainer does: token t is embedded as t - ``by`` was.
        ``unseen``: without a call of vLLM's, as code in the engine's own process may."""
        self.call("replace_weights", by=by, unseen=unseen)

    def scrub(self) -> None:
        """Fill every page of every rank with noise. Call it only between requests."""
        self.call("scrub")

    def pages(self) -> list[Pages]:
        """The digests of watched pages, by rank."""
        return msgspec.convert(self.call("pages"), list[Pages])

    def lay_out(self, name: str, tokens: Sequence[int]) -> tuple[int, str]:
        """Run a request whose forward pass only writes pages that follow from its tokens. Returns
        how many tokens it found cached or loaded, and which page was wrong ("": none)."""
        found, wrong = self.call("lay_out", name=name, tokens=list(tokens))
        return int(found), str(wrong)

    def groups(self) -> list[CacheGroup]:
        """vLLM's KV cache groups, by id."""
        return msgspec.convert(self.call("groups"), list[CacheGroup])

    def call(self, op: str, timeout_s: float = 300.0, **fields: Any) -> Any:
        """One command and its answer. :raises EngineDied: if none comes."""
        self._send(op, **fields)
        return self._read(timeout_s)

    def kill(self) -> None:
        """``kill -9`` all its processes. Idempotent."""
        if self._child.poll() is None:
            self._workers |= children(self.pid)
        self._child.send_signal(signal.SIGKILL)
        self._child.wait(10)
        for pid, began in self._workers.items():
            if began and _began(pid) == began:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        self._close_pipes()

    def close(self) -> int:
        """End the engine in good order, by force after 20 s; its exit status. Idempotent."""
        assert self._child.stdin is not None
        if not self._child.stdin.closed:
            try:
                self._child.stdin.close()
            except BrokenPipeError:
                pass
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            pass
        self.kill()  # the workers that are left
        return self._child.wait()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_pipes(self) -> None:
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # data that it never read
                    pass

    def _send(self, op: str, **fields: Any) -> None:
        self.wait_ready()
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self._died("is gone") from None

    def _read(self, timeout_s: float) -> Any:
        assert self._child.stdout is not None
        fd = self._child.stdout.fileno()
        until = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
                raise self._died(f"did not answer within {timeout_s:g} s")
            data = os.read(fd, 1 << 20)
            if not data:
                raise self._died("ended")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        reply = json.loads(line)
        if "error" in reply:
            raise self._died(f"failed: {reply['error']}")
        return reply["ok"]

    def _died(self, how: str) -> EngineDied:
        tail = self._log.read_text(errors="replace")[-4000:]
        return EngineDied(f"engine process {self.pid} {how}; the end of its log:\n{tail}")


class ServedEngine(EngineProcess):
    """An engine whose core is in a process of vLLM's own, as a server has it (``served``). Nothing
    measures or disturbs it."""

    child = "tests.support.vllm.served"

    def run(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """A greedy answer, and how many of the prompt's tokens were found cached."""
        answer, cached = self.call("run", tokens=list(tokens))
        return answer, cached

    def served(self, op: str, **fields: Any) -> None:
        """``update`` to the weights in ``folder``, ``update_by_function`` (``by`` as in
        ``replace_weights``), ``reset``, ``pause`` or ``resume``."""
        self.call(op, **fields)


def children(pid: int) -> dict[int, str]:
    """The live children of ``pid`` with their start times; without Python's resource tracker, which
    cleans up after the others and ends by itself."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, _read(file).split())
    tracker = b"resource_tracker"
    return {one: _began(one) for one in found if tracker not in _read(Path(f"/proc/{one}/cmdline"))}


def _began(pid: int) -> str:
    """The kernel's start time of ``pid`` (proc(5), stat, field 22); empty if it is gone."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
    return fields[19].decode() if fields else ""


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # gone meanwhile
        return b""
