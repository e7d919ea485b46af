"""The object store tier against what stands in for Azure Blob Storage."""

from __future__ import annotations

import pytest

from kvass.tiers import open_tier
from tests.support.servers.azure import AzureServer
from tests.tiers.conftest import Start
from tests.tiers.records import KEYS, OpenAt, Raw, SharedSuite, down, fill, hits, works

SERVER = AzureServer


@pytest.fixture(autouse=True)
def signed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class TestAzure(SharedSuite):
    @pytest.fixture
    def open_at(self, server: AzureServer) -> OpenAt:
        return lambda prefix: open_tier(server.url(f"suite/{prefix}"))

    @pytest.fixture
    def raw(self, server: AzureServer) -> Raw:
        blobs = server.containers["container"]
        name = "suite/{}/records/{}".format
        return Raw(
            lambda prefix, key: blobs[name(prefix, key.hex())],
            lambda prefix, key, value: blobs.update({name(prefix, key.hex()): value}),
        )


def test_absent_records_can_be_deleted(server: AzureServer, start: Start) -> None:
    """The client deletes by batches, and says of what is not there that it failed."""
    tier = start(open_tier, server.url("absent"))
    tier.delete(KEYS)
    assert all(fill(tier, KEYS[::2]))
    tier.delete(KEYS)
    assert not any(hits(tier, KEYS))


def test_an_unknown_container_is_said_until_it_is_there(server: AzureServer, start: Start) -> None:
    tier = start(open_tier, server.url("some", container="later"))
    assert all("ContainerNotFound" in text or "404" in text for text in down(tier, probe=False))
    server.containers["later"] = {}
    assert tier.probe(KEYS) == [False] * 10
    assert tier.note("epoch") is None
    assert works(tier)


def test_another_accounts_key_is_said(server: AzureServer, start: Start) -> None:
    tier = start(open_tier, server.url("guarded").replace("account=tester", "account=other"))
    assert all("403" in text or "AuthenticationFailed" in text for text in down(tier))
