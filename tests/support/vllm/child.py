"""The child's half of ``process``: one vLLM engine behind stdin and stdout.

It drives vLLM through public calls, and measures and disturbs the connector only from outside
(``instruments``), so the shipped code is what is tested. One rank runs in this process; several run
in processes that vLLM spawns, each with its own probe.

vLLM's in-process engine spins after a step that did nothing, where a served one sleeps 1 ms. The
loop here sleeps too, or threads of the connector would not get the GIL.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, TextIO

import msgspec

from tests.support.vllm import instruments
from tests.support.vllm.process import Answer, Hooks, Prompt, SeenStep
from tests.support.vllm.step_log import StepLog

DRAIN_S: Final = 30.0
ABORTED: Final = SimpleNamespace(token_ids=[], logprobs=[], finish_reason="abort")


def engine_args(config: dict[str, Any]) -> dict[str, Any]:
    """vLLM's ``EngineArgs`` of an engine. ``config``: its child's."""
    args: dict[str, Any] = {
        "model": config["model"],
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "block_size": 32,
        "max_num_seqs": 8,
        "seed": 0,
        **config["args"],
    }
    if "connector" in config:
        args["kv_transfer_config"] = instruments.transfer_config(config)
    if "transfer" in config:
        args["kv_transfer_config"] = config["transfer"]
        instruments.scan_dicts_only()
    return args


class ChildEngine:
    """vLLM's ``LLMEngine`` with the few things a test asks of it."""

    def __init__(self, config: dict[str, Any]) -> None:
        gc.disable()  # imports only add objects: collections would take time and free nothing
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        gc.freeze()
        self.probe = instruments.here()
        args = engine_args(config)
        if config["layout_only"]:
            instruments.pack_no_weights()
        if config.get("fork_ranks"):
            instruments.fork_ranks()
        self.engine = LLMEngine.from_engine_args(EngineArgs(**args))
        core = self.engine.engine_core.engine_core
        self.scheduler, self._executor = core.scheduler, core.model_executor
        if "connector" in config:
            self.probe.wrap(self.scheduler.connector)
            instruments.prepare(self.scheduler.connector, config["patient"], config["late"])
        self.pids: list[int] = [os.getpid()]
        if "transfer" not in config:
            self.pids = self.ranks(instruments.install)
        named = [self.scheduler.connector] if "transfer" in config else []
        named += [instruments.connector()] if named and instruments.has_connector() else []
        self.hooks_clock = instruments.HookClock(*named)
        self.probe.count_preemptions(self.scheduler)
        blends = getattr(self.scheduler, "blends", False)
        self.blend = instruments.BlendControls(self.scheduler) if blends else None
        self.step_log: StepLog | None = None
        self.hits: dict[str, tuple[int, int]] = {}
        self.engine.engine_core.get_output = self._noting_hits(self.engine.engine_core.get_output)
        self.count = 0
        gc.freeze()
        gc.enable()

    def ranks(self, call: Callable[..., Any], *args: object, seen: bool = False) -> list[Any]:
        """``call(worker, *args)`` in the process of every rank; the results by rank. The connector
        takes a call that it has ``seen`` for a change of weights."""
        unseen = type(self._executor).collective_rpc.__get__(self._executor)
        rpc = self._executor.collective_rpc if seen else unseen
        results: list[Any] = rpc(call, args=args)
        return results

    def connected(self) -> bool:
        """Whether the scheduler and all ranks are registered with the daemon."""
        planner = self.scheduler.connector._planner
        return planner.client.connected and all(self.ranks(instruments.connected))

    def load_in_steps(self, always: bool, own_recovery: bool, at_most: int) -> None:
        """See ``EngineProcess.load_in_steps``."""
        planner = self.scheduler.connector._planner
        assert planner.in_step.why_not == ""
        for patched in (planner.in_step, self.scheduler):
            for name in ("fits", "planned", "_handle_invalid_blocks"):
                vars(patched).pop(name, None)
        if always:
            planner.in_step.fits = lambda blocks: True
            planner.in_step.planned = lambda state: None
        if not own_recovery:
            self.scheduler.connector._take_back_failed_steps(self.scheduler)
        self.scheduler.scheduler_config.long_prefill_token_threshold = at_most if always else 0

    def hooks(self) -> Hooks:
        """The measurements of all probes."""
        several = len(self.pids) > 1
        return instruments.merged(
            [self.probe.report()] + (self.ranks(instruments.report) if several else [])
        )

    def steps(self) -> list[SeenStep]:
        """See ``EngineProcess.steps``."""
        self.step_log = self.step_log or StepLog(self.scheduler)
        return self.step_log.take()

    def lay_out(self, name: str, tokens: list[int]) -> list[object]:
        """A request without a forward pass (``layout_only``): the tokens it found, and which page
        was wrong."""
        from tests.support.vllm.ranks import StubModelEngine

        core = self.engine.engine_core.engine_core
        world = StubModelEngine.over(core, instruments.connector())
        world.generate(name, tokens)
        return [world.found[name], world.wrong]

    def groups(self) -> list[dict[str, Any]]:
        """Its KV cache groups (``process.CacheGroup``)."""
        pages = instruments.page_sizes()
        return [
            {
                "specs": sorted(
                    {
                        type(one).__name__
                        for one in getattr(
                            group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}
                        ).values()
                    }
                ),
                "block_tokens": group.kv_cache_spec.block_size,
                "layers": len(group.layer_names),
                "pages": pages[number] if pages else [],
            }
            for number, group in enumerate(self.scheduler.kv_cache_config.kv_cache_groups)
        ]

    def _noting_hits(self, get_output: Callable[[], Any]) -> Callable[[], Any]:
        def noting() -> Any:
            outputs = get_output()
            for output in outputs.outputs:
                stats = output.prefill_stats
                if stats is not None:
                    self.hits[output.request_id] = (
                        stats.num_local_cached_tokens,
                        stats.num_external_cached_tokens,
                    )
            return outputs

        return noting

    def step(self) -> list[Any]:
        """One step, with the pause of a served engine."""
        outputs: list[Any] = self.engine.step()
        if not outputs:
            time.sleep(0.001)
        return outputs

    def generate(self, prompts: list[Prompt]) -> list[Answer]:
        """Run the prompts to the end, then drain the stores they left."""
        waiting, steps, clock = deque(prompts), 0, self.hooks_clock
        added: dict[str, tuple[str, float, int, float]] = {}  # vLLM's name; time, steps, hooks then
        first: dict[str, tuple[float, int, float]] = {}
        made: dict[str, int] = {}  # no number is higher than that of one which has ended
        done: dict[str, tuple[Any, float, float]] = {}
        begun = time.monotonic()
        while len(done) < len(prompts):
            now, hooks_s = time.monotonic(), clock.seconds
            while waiting and all(made.get(name, 0) >= waiting[0].joins for name in added):
                if (at_s := waiting[0].at_s) > now - begun:
                    self._rest(begun + at_s - now)
                    break
                name, internal = self._add(waiting.popleft())
                added[name] = internal, begun + at_s if at_s else now, steps, hooks_s
            steps += 1
            for output in self.step():
                name, completion = output.request_id, output.outputs[0]
                _, since_s, before, hooks_before_s = added[name]
                took_s, hooked_s = time.monotonic() - since_s, clock.seconds - hooks_before_s
                made[name] = len(completion.token_ids)
                if made[name]:
                    first.setdefault(name, (took_s, steps - before, hooked_s))
                if output.finished:
                    made[name] = sys.maxsize
                    done[name] = (completion, took_s, hooked_s)
            for name, prompt in zip(added, prompts, strict=False):
                if name not in done and 0 < prompt.aborts <= steps - added[name][2]:
                    self.engine.abort_request([name])
                    made[name] = sys.maxsize
                    done[name] = (ABORTED, time.monotonic() - added[name][1], 0.0)
        self.drain()
        return [self._answer(name, one[0], first, done) for name, one in added.items()]

    def _rest(self, seconds: float) -> None:
        """Wait so long for the next prompt if there is nothing else to do."""
        if not self.scheduler.has_requests():
            time.sleep(seconds)

    def _add(self, prompt: Prompt) -> tuple[str, str]:
        from vllm import SamplingParams

        self.count += 1
        name = f"r{self.count}"
        extra: dict[str, Any] = {"kv_transfer_params": prompt.params} if prompt.params else {}
        params = SamplingParams(
            temperature=0,
            max_tokens=prompt.max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            skip_reading_prefix_cache=prompt.skip_prefix_cache or None,
            extra_args=extra or None,
        )
        inputs: dict[str, Any] = {"prompt_token_ids": prompt.tokens}
        if prompt.salt is not None:
            inputs["cache_salt"] = prompt.salt
        internal = self.engine.add_request(name, inputs, params, lora_request=_lora(prompt))
        return name, internal

    def _answer(
        self,
        name: str,
        internal: str,
        first: dict[str, tuple[float, int, float]],
        done: dict[str, tuple[Any, float, float]],
    ) -> Answer:
        completion, total_s, hooks_s = done[name]
        first_s, first_steps, first_hooks_s = first.get(name, (total_s, 0, hooks_s))
        local, external = self.hits.pop(internal, (0, 0))
        tokens = list(completion.token_ids)
        return Answer(
            tokens=tokens,
            logprobs=[
                step[t].logprob for t, step in zip(tokens, completion.logprobs or [], strict=False)
            ],
            local=local,
            external=external,
            first_token_s=first_s,
            total_s=total_s,
            finish_reason=completion.finish_reason,
            hooks_s=hooks_s,
            first_token_steps=first_steps,
            first_token_hooks_s=first_hooks_s,
        )

    def drain(self) -> None:
        """Step until the scheduler has nothing left, stores included."""
        until = time.monotonic() + DRAIN_S
        while self.scheduler.has_requests():
            if time.monotonic() > until:
                raise TimeoutError(f"the scheduler still had work after {DRAIN_S:g} s")
            self.step()

    def leave(self, prompts: list[Prompt], asks: bool, first: bool) -> None:
        """Run the prompts and drain nothing. With ``asks``, step while vLLM says that something is
        unfinished, as its ``LLM`` does; else until all have ended, with ``first`` until one has a
        token."""
        left = len([self._add(prompt) for prompt in prompts])
        while self.engine.has_unfinished_requests() if asks else left > 0:
            outputs = self.engine.step()
            left -= len(prompts) * bool(outputs) if first else sum(o.finished for o in outputs)

    def reset_at_once(self, running: bool) -> bool:
        """Clear vLLM's own prefix cache without a step; False if some block is still held.
        ``running``: running requests are to be preempted, so vLLM raises then."""
        return bool(self.engine.reset_prefix_cache(reset_running_requests=running))

    def reset(self, connector: bool) -> bool:
        """Clear vLLM's own prefix cache (and kvass's); False if some block is still held."""
        self.drain()
        return bool(self.engine.reset_prefix_cache(reset_connector=connector))


def _lora(prompt: Prompt) -> Any:
    if (folder := prompt.lora) is None:
        return None
    from vllm.lora.request import LoRARequest

    name = os.path.basename(folder)
    number = prompt.lora_id or 1 + sum(name.encode())
    return LoRARequest(name, number, folder, load_inplace=prompt.lora_in_place)


def serve(engine: ChildEngine, commands: TextIO, answer: Callable[[object], None]) -> None:
    """Carry out the commands until stdin ends."""
    probe = engine.probe
    for line in commands:
        fields = json.loads(line)
        match fields.pop("op"):
            case "generate":
                prompts = msgspec.convert(fields["prompts"], list[Prompt])
                answer(msgspec.to_builtins(engine.generate(prompts)))
            case "blend":
                assert engine.blend is not None
                answer(engine.blend.set(fields["select"], fields["control"]))
            case "first_layer_error":
                assert engine.blend is not None
                answer(engine.blend.first_layer_error())
            case "chosen":
                assert engine.blend is not None
                answer(engine.blend.chosen)
            case "leave":
                left = msgspec.convert(fields["prompts"], list[Prompt])
                engine.leave(left, fields["asks"], fields["first"])
                answer(None)
            case "reset_at_once":
                answer(engine.reset_at_once(fields["running"]))
            case "reset":
                answer(engine.reset(fields["connector"]))
            case "add_lora":
                lora = _lora(msgspec.convert(fields["prompt"], Prompt))
                answer(engine.engine.add_lora(lora))
            case "unstored":
                answer(probe.unstored)
            case "in_step":
                answer(engine.ranks(instruments.in_step))
            case "load_in_steps":
                engine.load_in_steps(fields["always"], fields["own_recovery"], fields["at_most"])
                answer(None)
            case "steps":
                answer(msgspec.to_builtins(engine.steps()))
            case "connected":
                answer(engine.connected())
            case "hooks":
                answer(msgspec.to_builtins(engine.hooks()))
            case "reset_hooks":
                probe.clear()
                engine.ranks(instruments.clear)
                answer(None)
            case "arm":
                probe.arm(fields["hook"], fields["when"], fields["signals"])
                answer(None)
            case "arm_rank":
                engine.ranks(
                    instruments.arm, *(fields[n] for n in ("rank", "hook", "when", "signals"))
                )
                answer(None)
            case "lay_out":
                answer(engine.lay_out(fields["name"], fields["tokens"]))
            case "groups":
                answer(engine.groups())
            case "ranks":
                answer(engine.pids)
            case "disturb":
                engine.ranks(instruments.disturb, fields["rank"], fields["settings"])
                answer(None)
            case "verify_again":
                instruments.switch_on(engine.scheduler.connector)
                engine.ranks(instruments.verify_again)
                answer(None)
            case "replace_weights":
                seen = not fields["unseen"]
                engine.ranks(instruments.replace_weights, fields["by"], seen=seen)
                answer(None)
            case "scrub":
                engine.ranks(instruments.scrub)
                answer(None)
            case "pages":
                answer(msgspec.to_builtins(engine.ranks(instruments.pages)))
            case other:
                raise ValueError(f"no such command: {other}")


def main() -> int:
    """Entry point: ``python -m tests.support.vllm.child '{"model": ...}'``."""
    wire = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints; stdout belongs to the protocol

    def say(message: dict[str, object]) -> None:
        wire.write(json.dumps(message) + "\n")

    try:
        engine = ChildEngine(json.loads(sys.argv[1]))
        say({"ok": "ready"})
        serve(engine, sys.stdin, lambda value: say({"ok": value}))
        engine.engine.engine_core.shutdown()
    except Exception as error:  # noqa: BLE001 - the parent is told
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
