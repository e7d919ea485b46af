"""The connector of transformers passes ``ConnectorSuite``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvass.connectors.transformers import connect
from kvass.testing import ConnectorSuite, EngineUnderTest, RunResult
from kvass.testing.connector_suite import MakeEngine
from tests.support.hf_models import CHUNK, CLOSE, GREEDY, logits, make


class Logits:
    """The logits of an answer. Those after a hit are computed in other steps."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Logits) and np.allclose(
            self.values, other.values, rtol=10 * CLOSE["rtol"], atol=10 * CLOSE["atol"]
        )


class Llama(EngineUnderTest):
    chunk_tokens = CHUNK

    def __init__(self, socket: str, weights: str, tenant: str = "") -> None:
        self.model, self.tenant = self._made(weights), tenant
        self.cached = connect(self.model, socket=socket, chunk_tokens=CHUNK, wait_s=0)

    @staticmethod
    def _made(weights: str) -> Any:
        return make(seed=int(weights), vocab_size=1024)

    def run(self, prompt: list[int]) -> RunResult:
        output = self.cached.generate(torch.tensor([prompt]), tenant=self.tenant, **GREEDY)
        return RunResult(Logits(logits(output)), self.cached.last.loaded)

    def wait_connected(self) -> None:
        assert self.cached.wait_connected(30)

    def replace_weights(self, weights: str) -> None:
        with torch.no_grad():
            for mine, new in zip(
                self.model.parameters(), self._made(weights).parameters(), strict=True
            ):
                mine.copy_(new)

    def close(self) -> None:
        self.cached.close()


class TestTransformers(ConnectorSuite):
    has_layouts = False

    @pytest.fixture
    def make_engine(self) -> MakeEngine:
        return Llama
